"""Tokenizers of captions: by words, or by byte pairs from a file such as CLIP's."""

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from moecore.core import config, source_layout
from moecore.core.files import UserError, file_checksum, find_raw_file, write_atomic
from moecore.data.text.words import list_words_by_min_count, lower_words, read_vocabulary_lines
from moecore.tasks.image_text import ImageText

PAD, START, END, UNKNOWN = "<pad>", "<start>", "<end>", "<unk>"
SPECIAL = (PAD, START, END, UNKNOWN)
OURS, THEIRS = "vocabulary.txt", "tokenizer.json"
CLIP_TOKENS = ("<|startoftext|>", "<|endoftext|>")


class EncodedCaption(NamedTuple):
    tokens: list[int]
    cut: bool
    unknown: int  # number of words outside the vocabulary


class WordTokenizer:
    """Tokenizer of lower-case words, with punctuation as separate words."""

    def __init__(self, ordinary_words: Sequence[str]) -> None:
        """Build the vocabulary: SPECIAL, then ``ordinary_words``, which are unique."""
        self.vocabulary = (*SPECIAL, *ordinary_words)
        self.numbers = {word: number for number, word in enumerate(self.vocabulary)}
        self.words = len(self.vocabulary)
        self.end = SPECIAL.index(END)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._vocabulary_text().encode()).hexdigest()

    def encode(self, text: str, context: int) -> EncodedCaption:
        """Return ``context`` tokens: START, words, END, PAD; extra words are cut."""
        numbers = [self.numbers.get(word, SPECIAL.index(UNKNOWN)) for word in lower_words(text)]
        tokens, cut = frame_and_fit(numbers, context, SPECIAL.index(START), self.end)
        return EncodedCaption(tokens, cut, numbers.count(SPECIAL.index(UNKNOWN)))

    def word(self, token: int) -> str:
        return self.vocabulary[token]

    def write(self, folder: Path) -> str:
        write_atomic(folder / OURS, self._vocabulary_text())
        return OURS

    def _vocabulary_text(self) -> str:
        return "".join(f"{word}\n" for word in self.vocabulary)


class BpeTokenizer:
    """Tokenizer of byte pairs, read from a ``tokenizer.json`` such as CLIP's."""

    def __init__(self, path: Path, size: int) -> None:
        """Load tokenizer.json; UserError unless it has ``size`` words and CLIP's special tokens."""
        tokenizers = source_layout.import_optional_library("tokenizers", "text")  # slow to import
        self.path = path
        if not path.is_file():
            raise UserError(f"{path}: no such file; allowed: a tokenizer.json, such as CLIP's")
        try:
            self.loaded = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{path}: not a tokenizer.json: {error}") from error
        self.loaded.no_truncation()
        self.loaded.no_padding()
        self.words = self.loaded.get_vocab_size()
        if self.words != size:
            says = f"{size:,}, as tokenizer.words says"
            raise UserError.at(path, found=f"{self.words:,} words", allowed=says)
        numbers: dict[str, Any] = {name: self.loaded.token_to_id(name) for name in CLIP_TOKENS}
        if missing := [special for special, number in numbers.items() if number is None]:
            raise UserError(f"{path}: lacks the token {missing[0]}; allowed: CLIP's vocabulary")
        self.start, self.end = numbers.values()

    @cached_property
    def digest(self) -> str:
        return file_checksum(self.path)

    def encode(self, text: str, context: int) -> EncodedCaption:
        numbers = self.loaded.encode(text, add_special_tokens=False).ids
        tokens, cut = frame_and_fit(numbers, context, self.start, self.end)
        return EncodedCaption(tokens, cut, 0)

    def word(self, token: int) -> str:
        return str(self.loaded.id_to_token(token))

    def write(self, folder: Path) -> str:
        shutil.copyfile(self.path, folder / THEIRS)
        return THEIRS


Tokenizer = WordTokenizer | BpeTokenizer


def frame_and_fit(numbers: list[int], context: int, start: int, end: int) -> tuple[list[int], bool]:
    """Return ``context`` tokens: start, numbers, end, zeros; and whether numbers were cut."""
    fitting = numbers[: context - 2]
    tokens = [start, *fitting, end]
    return tokens + [0] * (context - len(tokens)), len(fitting) < len(numbers)


class WordSettings(config.Config):
    """Settings of a tokenizer whose vocabulary is the training captions' words."""

    kind: Literal["words"] = "words"

    def build(self, training: Iterable[str]) -> WordTokenizer:
        """Build a tokenizer of all words in the ``training`` captions, most frequent first."""
        frequent = list_words_by_min_count(map(lower_words, training), minimum=1)
        return WordTokenizer([word for word in frequent if word not in SPECIAL])


class BpeFileSettings(config.Config):
    """Settings of a byte-pair tokenizer from a file."""

    kind: Literal["bpe"] = "bpe"
    file: str = Field(description="tokenizer.json of the `tokenizers` library, such as CLIP's")
    words: int = Field(49408, ge=4, description="Number of words of its vocabulary, checked")

    def build(self, training: Iterable[str]) -> BpeTokenizer:
        """Return the file's tokenizer; the captions are not used."""
        return BpeTokenizer(find_raw_file(self.file), self.words)


AnyTokenizer = Annotated[WordSettings | BpeFileSettings, Field(discriminator="kind")]


def load_tokenizer(folder: Path, task: ImageText) -> Tokenizer:
    """Load the tokenizer in ``folder``; UserError if it is missing or not the task's."""
    path = folder / THEIRS
    if path.is_file():
        tokenizer: Tokenizer = BpeTokenizer(path, task.words)
    else:
        path = folder / OURS
        tokenizer = WordTokenizer(read_vocabulary_lines(path)[len(SPECIAL) :])
    if tokenizer.digest != task.vocabulary:
        raise UserError(f"{path}: found another vocabulary than the model's; run `prepare` again")
    return tokenizer

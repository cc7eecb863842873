"""Words, vocabularies and the prepared layout of text.

``{train,validation,test}_tokens.npy`` are int32 (n,), ``vocabulary.txt`` has a word a line, in the
order of the token numbers. A split's items are blocks of M tokens, each read with the C − 1 blocks
before it: see ``block_windows``. Where each token's kind is known, ``…_truth.npy`` are uint8 (n,).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, file_checksum, write_sealed, write_whole
from moecore.data.sources.base import Source
from moecore.data.stored_arrays import save_array
from moecore.tasks.next_token import NextToken

END = "<eos>"
UNKNOWN = "<unk>"
SPLITS = ("train", "validation", "test")
WORD = re.compile(r"[^\W_]+(?:['\-_][^\W_]+)*|[^\w\s]|_")
NONE = -1  # the token before a text's first
# How a text becomes words: in lower case with punctuation apart, or apart by blanks as it is.
ReadingStyle = Literal["prose", "blanks"]


class NumberedText(NamedTuple):
    """The splits of a text, before they are written."""

    tokens: Mapping[str, np.ndarray]  # split → int32 (n,)
    vocabulary: Sequence[str]
    about: Mapping[str, Any]  # name, licence and source, and what else the card is to say
    truth: Mapping[str, np.ndarray] = {}  # split → uint8 (n,), each token's kind; 0: not known


class TextSource(Source):
    """Fields that every source of text shares."""

    task: ClassVar[type[NextToken]] = NextToken  # of what ``prepare`` writes
    reading: ClassVar[ReadingStyle]

    block: int = Field(64, ge=1, description="tokens of a block, M: an item of every table")
    context: int = Field(
        3,
        ge=0,
        description="blocks that a block is read with where a model starts anew; with "
        "model.depth · model.span / block of them as if it had read all of the text",
    )

    @property
    def size(self) -> tuple[int]:
        """Size that a model is built for: blocks of M tokens."""
        return (self.block,)


def lower_words(text: str) -> list[str]:
    """The words of a text in lower case, punctuation apart."""
    return WORD.findall(text.lower())


def split_prompt_words(text: str, reading: ReadingStyle) -> list[str]:
    """The words of a text that somebody wrote, as a source with this reading would have them:
    ``<eos>`` before it and between its paragraphs (prose) or lines (blanks), none at its end.
    """
    if reading == "prose":
        parts = [lower_words(part) for part in re.split(r"\n\s*\n", text.strip())]
    else:
        parts = [line.split() for line in text.strip().split("\n")]
    return [word for part in parts for word in (END, *part)]


def build_vocabulary(train: Iterable[Sequence[str]], least: int) -> list[str]:
    """The vocabulary of training lines: ``<eos>``, ``<unk>``, and the frequent words."""
    words = frequent_words(train, least)
    return [END, UNKNOWN, *(word for word in words if word not in (END, UNKNOWN))]


def frequent_words(lines: Iterable[Sequence[str]], least: int) -> list[str]:
    """The words that occur at least ``least`` times, most frequent first, ties by the alphabet."""
    counts = Counter(word for line in lines for word in line)
    kept = [word for word, number in counts.items() if number >= least]
    return sorted(kept, key=lambda word: (-counts[word], word))


def number_tokens(lines: Iterable[Sequence[str]], numbers: Mapping[str, int]) -> np.ndarray:
    """Token numbers (n,) int32 of lines, each closed by ``<eos>``; unknown words ``<unk>``."""
    unknown = numbers[UNKNOWN]
    every = (numbers.get(word, unknown) for line in lines for word in (*line, END))
    return np.fromiter(every, np.int32)


def block_windows(tokens: np.ndarray, block: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks with what is read before them, and the words after each token.

    tokens: (n,). Returns (N, C, M) with C = context + 1, whose last M tokens are the block and of
    which those before the text's start are −1, and (N, M); N = (n − 1) // M, the incomplete block
    at the end is left out. Both are views of one array, C·M tokens longer than the text at most.
    """
    number = (len(tokens) - 1) // block
    before = np.full(context * block, NONE, tokens.dtype)
    padded = np.concatenate([before, tokens]) if context else tokens
    step = padded.strides[0]
    shape, strides = (number, context + 1, block), (block * step, block * step, step)
    images = np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)
    labels = tokens[1 : number * block + 1].reshape(number, block)
    return images, labels


def write_text(folder: Path, settings: TextSource, written: NumberedText) -> dict[str, Any]:
    """Write the prepared layout to ``folder`` and return its card.

    Raises UserError where a split has no full block.
    """
    folder = Path(folder)
    tokens, vocabulary, about, truth = written
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        if len(tokens[split]) <= settings.block:
            short = f"the split {split} has {len(tokens[split])} tokens"
            raise UserError(f"{about['name']}: {short}; a block of {settings.block} needs more")
        save_array(folder / f"{split}_tokens.npy", tokens[split])
        if truth:
            save_array(folder / f"{split}_truth.npy", truth[split])
    text = "".join(f"{word}\n" for word in vocabulary)
    write_whole(folder / "vocabulary.txt", text)
    files = [*(f"{split}_tokens.npy" for split in SPLITS), "vocabulary.txt"]
    files += [f"{split}_truth.npy" for split in truth]
    unknown = list(vocabulary).index(UNKNOWN)
    channels = settings.context + 1
    card = {
        **about,
        "kind": settings.model_dump()["kind"],
        "reading": settings.reading,
        "task": NextToken(words=len(vocabulary)).model_dump(mode="json"),
        "channels": channels,
        "size": [settings.block],
        "images": {split: (len(tokens[split]) - 1) // settings.block for split in SPLITS},
        "tokens": {split: len(tokens[split]) for split in SPLITS},
        "counts": {
            split: {"<unk>": int((tokens[split] == unknown).sum()), "tokens": len(tokens[split])}
            for split in SPLITS
        },
        "mean": [0.0] * channels,
        "std": [1.0] * channels,
        "files": {name: file_checksum(folder / name) for name in files},
        "settings": settings.model_dump(mode="json"),
    }
    write_sealed(folder / "card.json", card)
    return card


def read_vocabulary(folder: Path, words: int) -> list[str]:
    """The words of a prepared text, or of a model of one, in the order of their numbers. Raises
    UserError where the file is missing, is not UTF-8, or has not as many ``words`` as the model.
    """
    path = folder / "vocabulary.txt"
    try:
        vocabulary = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; run the stage `prepare` again") from error
    again = "run the stage that writes it again"
    if len(vocabulary) != words:
        raise UserError(f"{path}: found {len(vocabulary):,} words; allowed: {words:,}; {again}")
    if lacking := {UNKNOWN, END} - set(vocabulary):
        raise UserError(f"{path}: found no {min(lacking)}, which every vocabulary has; {again}")
    return vocabulary


def stop_word_labels(vocabulary: list[str]) -> np.ndarray:
    """Return of each word 1 for a stop word, 0 for another, -1 for punctuation and marks, (V,).

    scikit-learn's English stop words: articles, prepositions, pronouns, conjunctions, auxiliaries
    and few words of content.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS  # slow to import

    return np.array(
        [
            int(word.lower() in ENGLISH_STOP_WORDS)
            if word not in (END, UNKNOWN) and any(map(str.isalnum, word))
            else -1
            for word in vocabulary
        ]
    )

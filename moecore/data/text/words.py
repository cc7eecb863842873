"""Words, vocabularies, and the base class of text sources."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.layouts.text import END, UNKNOWN, TokenizedText, write_text
from moecore.data.sources.base import Source
from moecore.tasks.next_token import NextToken

WORD_PATTERN = re.compile(r"[^\W_]+(?:['\-_][^\W_]+)*|[^\w\s]|_")
# How text becomes words: "prose" lower-cases and separates punctuation, "blanks" splits at blanks.
WordSplitting = Literal["prose", "blanks"]


class TextSource(Source):
    """Base class of text sources, whose items are blocks of M tokens."""

    task: ClassVar[type[NextToken]] = NextToken
    reading: ClassVar[WordSplitting]

    block: int = Field(64, ge=1, description="Tokens per block, M; a block is one item")
    context: int = Field(
        3,
        ge=0,
        description="Blocks read before each block, where models start without memory; "
        "model.depth · model.span / block of them are as good as all of the text",
    )

    @property
    def size(self) -> tuple[int]:
        """Size of an item for models: (M,), the tokens of a block."""
        return (self.block,)

    def text_card(self, name: str, licence: str, source: str, vocabulary_size: int = 2) -> Card:
        """Return the card of a text; ``vocabulary_size`` is 2 while unknown."""
        task = NextToken(words=vocabulary_size)
        more = {"reading": self.reading}
        return Card(name, self.context + 1, self.size, task, licence, source, more=more)

    @abstractmethod
    def read(self) -> TokenizedText:
        """Read the text of all splits; UserError if it is missing or invalid."""

    def write(self, folder: Path) -> dict[str, Any]:
        return write_text(folder, self, self.describe(), self.read())


def lower_words(text: str) -> list[str]:
    """Return the lower-case words of a text, with punctuation as separate words."""
    return WORD_PATTERN.findall(text.lower())


def split_prompt_words(text: str, reading: WordSplitting) -> list[str]:
    """Return a prompt's words, ``<eos>`` before every paragraph (prose) or line (blanks)."""
    if reading == "prose":
        parts = [lower_words(part) for part in re.split(r"\n\s*\n", text.strip())]
    else:
        parts = [line.split() for line in text.strip().split("\n")]
    return [word for part in parts for word in (END, *part)]


def build_vocabulary(train: Iterable[Sequence[str]], minimum: int) -> list[str]:
    """Return ``<eos>``, ``<unk>``, and the words with ``minimum`` or more occurrences."""
    frequent = list_words_by_min_count(train, minimum)
    return [END, UNKNOWN, *(word for word in frequent if word not in (END, UNKNOWN))]


def list_words_by_min_count(lines: Iterable[Sequence[str]], minimum: int) -> list[str]:
    """Return words that occur at least ``minimum`` times, by frequency, then alphabetically."""
    counts = Counter(word for line in lines for word in line)
    frequent = [word for word, number in counts.items() if number >= minimum]
    return sorted(frequent, key=lambda word: (-counts[word], word))


def tokenize_lines(lines: Iterable[Sequence[str]], numbers: Mapping[str, int]) -> np.ndarray:
    """Convert lines to tokens int32 (n,) by ``numbers``, word → token; lines end with ``<eos>``."""
    unknown = numbers[UNKNOWN]
    tokens = (numbers.get(word, unknown) for line in lines for word in (*line, END))
    return np.fromiter(tokens, np.int32)


def read_vocabulary_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; run the stage `prepare` again") from error


def read_vocabulary(folder: Path, size: int) -> list[str]:
    """Read vocabulary.txt, words in the order of tokens; UserError unless it has ``size`` words."""
    path = folder / "vocabulary.txt"
    vocabulary = read_vocabulary_lines(path)
    remedy = "run the stage that writes it again"
    if len(vocabulary) != size:
        raise UserError(f"{path}: found {len(vocabulary):,} words; allowed: {size:,}; {remedy}")
    if missing := {UNKNOWN, END} - set(vocabulary):
        raise UserError(f"{path}: found no {min(missing)}, which every vocabulary has; {remedy}")
    return vocabulary


def stop_word_labels(vocabulary: list[str]) -> np.ndarray:
    """Label a vocabulary (V,): 1 for English stop words, 0 for other words, −1 for non-words."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS  # slow to import

    labels = [int(word.lower() in ENGLISH_STOP_WORDS) for word in vocabulary]
    is_word = [word not in (END, UNKNOWN) and any(map(str.isalnum, word)) for word in vocabulary]
    return np.where(is_word, labels, -1)

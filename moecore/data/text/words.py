"""Words, vocabularies, and what the sources of text share."""

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
from moecore.data.layouts.text import END, UNKNOWN, NumberedText, write_text
from moecore.data.sources.base import Source
from moecore.tasks.next_token import NextToken

WORD = re.compile(r"[^\W_]+(?:['\-_][^\W_]+)*|[^\w\s]|_")
# How a text becomes words: in lower case with punctuation apart, or apart by blanks as it is.
ReadingStyle = Literal["prose", "blanks"]


class TextSource(Source):
    """Fields that every source of text shares."""

    task: ClassVar[type[NextToken]] = NextToken
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

    def text_card(self, name: str, licence: str, source: str, words: int = 2) -> Card:
        """Return the card of a text with so many words; 2, the fewest: they are not known yet."""
        task, more = NextToken(words=words), {"reading": self.reading}
        return Card(name, self.context + 1, self.size, task, licence, source, more=more)

    @abstractmethod
    def read(self) -> NumberedText:
        """Return the text of all splits; UserError where it is missing or misfits."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return the card."""
        return write_text(folder, self, self.describe(), self.read())


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

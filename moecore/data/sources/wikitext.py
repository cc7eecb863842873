"""WikiText (Merity et al. 2016), or any text in its form: a file of words a split.

Counted as Transformer-XL's and MomentumSMoE's code does: a line's words and ``<eos>``, an empty
line ``<eos>`` alone, the vocabulary of all three files in the order of appearance.
"""

from array import array
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, candidate_folders, file_checksum
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import END, UNKNOWN, NumberedText
from moecore.data.text.words import ReadingStyle, TextSource

SPLIT_FILES = {
    "train": ("wiki.train.tokens", "train.txt"),
    "validation": ("wiki.valid.tokens", "valid.txt"),
    "test": ("wiki.test.tokens", "test.txt"),
}
# words of the vocabulary, tokens of the training split
PRINTED_COUNTS = {"wikitext-103": (267_735, 103_227_021)}


class Wikitext(TextSource):
    """``root/wiki.{train,valid,test}.tokens``, or ``.txt``; UTF-8, words apart by blanks."""

    reading: ClassVar[ReadingStyle] = "blanks"

    kind: Literal["wikitext"] = "wikitext"
    root: str = Field(description="folder with the three files")
    name: str = Field(
        "wikitext", description="wikitext-103: refused unless it has as many words and tokens"
    )
    licence: str = Field("CC BY-SA 3.0", description="licence of the text, for the card")

    def describe(self) -> Card:
        """Return what ``write`` would write; words are counted only then."""
        words = PRINTED_COUNTS.get(self.name, (2, 0))[0]
        card = self.text_card(self.name, self.licence, self.root, words)

        def look() -> dict[str, Any]:
            self._files()
            return {}

        return card.complete_with(look)

    def read(self) -> NumberedText:
        """Return the text of all splits; UserError for files that misfit."""
        files = self._files()
        numbers: dict[str, int] = {}
        tokens = {split: read_and_number_words(files[split], numbers) for split in SPLITS}
        if self.name in PRINTED_COUNTS:
            self._check_printed(len(numbers), len(tokens["train"]))
        vocabulary = list(numbers)
        if UNKNOWN not in numbers:
            vocabulary.append(UNKNOWN)
        read = {path.name: file_checksum(path) for path in files.values()}
        return NumberedText(tokens, vocabulary, {"read": read})

    def _files(self) -> dict[str, Path]:
        for root in candidate_folders(self.root):
            paths = {
                split: next((root / name for name in names if (root / name).is_file()), None)
                for split, names in SPLIT_FILES.items()
            }
            if all(paths.values()):
                return {split: path for split, path in paths.items() if path is not None}
        tried = ", ".join(map(str, candidate_folders(self.root)))
        allowed = "a folder with wiki.{train,valid,test}.tokens or {train,valid,test}.txt"
        raise UserError(f"root: found {tried}, where a file is missing; allowed: {allowed}")

    def _check_printed(self, words: int, tokens: int) -> None:
        wanted, long = PRINTED_COUNTS[self.name]
        if (words, tokens) != (wanted, long):
            counted = f"found {words:,} words and {tokens:,} training tokens"
            allowed = f"allowed with name {self.name}: {wanted:,} and {long:,}"
            raise UserError(f"{self.root}: {counted}; {allowed}, or another name")


def read_and_number_words(path: Path, numbers: dict[str, int]) -> np.ndarray:
    """Token numbers (n,) int32 of a file; words that are new are added to ``numbers``.

    Raises UserError where it is empty or not UTF-8.
    """
    tokens = array("i")
    lines = 0
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for text in file:
                lines += 1
                words = [*text.split(), END]
                tokens.extend([numbers.setdefault(word, len(numbers)) for word in words])
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: after line {lines}: found {error}; allowed: UTF-8") from error
    if not lines:
        raise UserError(f"{path}: found no line; allowed: the words of a text")
    return np.frombuffer(tokens, np.int32)

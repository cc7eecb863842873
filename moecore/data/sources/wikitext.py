"""WikiText (Merity et al. 2016), or any text in its form: one file of words per split.

Counted as in the code of Transformer-XL and MomentumSMoE: a line is its words and ``<eos>``, an
empty line is ``<eos>`` alone, the vocabulary has all words of all files in order of appearance.
"""

from array import array
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, candidate_raw_folders, file_checksum
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import END, UNKNOWN, TokenizedText
from moecore.data.text.words import TextSource, WordSplitting

SPLIT_FILES = {
    "train": ("wiki.train.tokens", "train.txt"),
    "validation": ("wiki.valid.tokens", "valid.txt"),
    "test": ("wiki.test.tokens", "test.txt"),
}
# published size of the vocabulary, and tokens of the training split
PUBLISHED_COUNTS = {"wikitext-103": (267_735, 103_227_021)}


class Wikitext(TextSource):
    """Text in ``root/wiki.{train,valid,test}.tokens`` or ``.txt``, words separated by blanks."""

    reading: ClassVar[WordSplitting] = "blanks"

    kind: Literal["wikitext"] = "wikitext"
    root: str = Field(description="folder with the three files")
    name: str = Field("wikitext", description="wikitext-103: numbers of words and tokens checked")
    licence: str = Field("CC BY-SA 3.0", description="licence of the text, for the card")

    def describe(self) -> Card:
        vocabulary_size = PUBLISHED_COUNTS.get(self.name, (2, 0))[0]
        card = self.text_card(self.name, self.licence, self.root, vocabulary_size)
        return card.add_check_problem(self._find_split_files)

    def read(self) -> TokenizedText:
        files = self._find_split_files()
        numbers: dict[str, int] = {}
        tokens = {split: tokenize_and_extend_vocabulary(files[split], numbers) for split in SPLITS}
        counts = (len(numbers), len(tokens["train"]))
        if (expected := PUBLISHED_COUNTS.get(self.name, counts)) != counts:
            raise UserError(
                f"{self.root}: found {counts[0]:,} words and {counts[1]:,} training tokens; "
                f"allowed with name {self.name}: {expected[0]:,} and {expected[1]:,}, or a new name"
            )
        vocabulary = list(numbers)
        if UNKNOWN not in numbers:
            vocabulary.append(UNKNOWN)
        checksums = {path.name: file_checksum(path) for path in files.values()}
        return TokenizedText(tokens, vocabulary, {"read": checksums})

    def _find_split_files(self) -> dict[str, Path]:
        for root in candidate_raw_folders(self.root):
            paths = {
                split: next((root / name for name in names if (root / name).is_file()), None)
                for split, names in SPLIT_FILES.items()
            }
            files = {split: path for split, path in paths.items() if path is not None}
            if len(files) == len(SPLITS):
                return files
        folders = ", ".join(map(str, candidate_raw_folders(self.root)))
        raise UserError.at(
            "root",
            found=f"{folders}, where a file is missing",
            allowed="a folder with wiki.{train,valid,test}.tokens or {train,valid,test}.txt",
        )


def tokenize_and_extend_vocabulary(path: Path, numbers: dict[str, int]) -> np.ndarray:
    """Return a file's tokens int32 (n,), and add its new words to ``numbers`` (word → token)."""
    tokens = array("i")
    lines = 0
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for text in file:
                lines += 1
                line_words = [*text.split(), END]
                tokens.extend([numbers.setdefault(word, len(numbers)) for word in line_words])
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: after line {lines}: found {error}; allowed: UTF-8") from error
    if not lines:
        raise UserError(f"{path}: found no line; allowed: the words of a text")
    return np.frombuffer(tokens, np.int32)

"""The prose in docstrings of installed packages: English text that needs no download.

Files are read with ``ast`` and never imported.
"""

import ast
import hashlib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import NumberedText
from moecore.data.text.words import (
    ReadingStyle,
    TextSource,
    build_vocabulary,
    lower_words,
    number_tokens,
)

PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "scikit-learn", "scipy", "sympy", "timm")
CODE = (">>>", "---", "===", "::")  # what prose does not have
LEAST = 3  # times that a word of the vocabulary occurs
LEAST_WORDS = 8  # of a paragraph
LEAST_LETTERS = 0.7  # share of its characters


class DocstringSource(TextSource):
    """Fields of the sources that read docstrings, and how they are read."""

    reading: ClassVar[ReadingStyle] = "prose"

    packages: tuple[str, ...] = Field(
        PACKAGES, min_length=1, description="installed distributions whose docstrings are read"
    )
    validation: float = Field(0.05, gt=0, lt=0.5, description="share of the files")
    test: float = Field(0.05, gt=0, lt=0.5, description="share of the files")

    def read(self) -> NumberedText:
        """Return the text of all splits; UserError where a package lacks."""
        lines: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        versions = {name: find_distribution(name).version for name in self.packages}
        for name in sorted(self.packages):
            for path, text in read_python_files(name):
                for paragraph in extract_docstring_prose(text, path):
                    if (identity := self.identify_paragraph(paragraph)) not in seen:
                        seen.add(identity)
                        lines[self._split(path)].append(lower_words(paragraph))
        vocabulary = build_vocabulary(lines["train"], LEAST)
        numbers = {word: number for number, word in enumerate(vocabulary)}
        tokens = {split: number_tokens(part, numbers) for split, part in lines.items()}
        more = {
            "packages": versions,
            "lines": {split: len(part) for split, part in lines.items()},
        }
        return NumberedText(tokens, vocabulary, more)

    def describe(self) -> Card:
        """Return what ``write`` would write; how many words there are is not known before."""
        licence = "BSD and MIT; matplotlib: its own, Apache-2.0: timm"
        card = self.text_card("Docstrings", licence, "docstrings of installed packages")

        def look() -> dict[str, Any]:
            for name in self.packages:
                find_distribution(name)
            return {}

        return card.complete_with(look)

    def identify_paragraph(self, paragraph: str) -> str:
        """Return what two paragraphs must share for the later one to be left out."""
        return paragraph

    def _split(self, path: str) -> str:
        place = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) / 2**32
        if place < self.test:
            return "test"
        if place < self.test + self.validation:
            return "validation"
        return "train"


class Docstrings(DocstringSource):
    """Paragraphs of prose, each once, in the order of packages and files; a line each.

    A file's split is decided by the sha256 of its path in the package, so a new release of one
    package moves no file of another. Words rarer than LEAST in training are ``<unk>``.
    """

    kind: Literal["docstrings"] = "docstrings"


def find_distribution(name: str) -> Distribution:
    """An installed distribution. Raises UserError where there is none of this name."""
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        mend = f"allowed: installed distributions, such as {', '.join(PACKAGES)}"
        raise UserError(f"packages: found {name}, which is not installed; {mend}") from error


def read_python_files(name: str) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of a distribution but its tests, in the order of paths."""
    package = find_distribution(name)
    paths = sorted(str(path) for path in package.files or () if str(path).endswith(".py"))
    for path in paths:
        if "tests" in Path(path).parts or ".." in Path(path).parts:
            continue
        file = Path(str(package.locate_file(path)))
        try:
            yield path, file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: found {error}; allowed: UTF-8") from error


def extract_docstring_prose(source: str, path: str = "source") -> Iterator[str]:
    """The paragraphs of a Python file's docstrings that are prose, blanks joined to one.

    Raises UserError, naming ``path``, where it is no Python of this version.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # brackets, no end
        why = str(error) or "nested too deep"
        raise UserError(
            f"{path}: no Python of this version: {why}; leave its package out"
        ) from None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            text = " ".join(paragraph.split())
            letters = sum(map(str.isalpha, text))
            plain = letters > LEAST_LETTERS * len(text)
            coded = any(mark in text for mark in CODE)
            if plain and not coded and len(text.split()) >= LEAST_WORDS:
                yield text

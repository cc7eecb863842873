"""The prose in docstrings of installed packages, which are parsed and never imported."""

import ast
import hashlib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.text import TokenizedText
from moecore.data.text import words

PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "scikit-learn", "scipy", "sympy", "timm")
CODE_MARKS = (">>>", "---", "===", "::")  # marks of code and markup; prose has none of them
MIN_WORD_COUNT = 3  # occurrences in training of a word of the vocabulary
MIN_WORDS = 8  # of a paragraph
MIN_LETTER_SHARE = 0.7  # share of letters among a paragraph's characters


class DocstringSourceBase(words.TextSource):
    """Base class of the sources that read docstrings of installed packages."""

    reading: ClassVar[words.WordSplitting] = "prose"

    packages: tuple[str, ...] = Field(
        PACKAGES, min_length=1, description="installed distributions whose docstrings are read"
    )
    validation: float = Field(0.05, gt=0, lt=0.5, description="share of the files")
    test: float = Field(0.05, gt=0, lt=0.5, description="share of the files")

    def read(self) -> TokenizedText:
        lines: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
        identities: set[str] = set()
        versions = self._versions()
        for name in sorted(self.packages):
            for path, text in read_python_files(name):
                for paragraph in extract_docstring_prose(text, path):
                    if (identity := self.paragraph_duplicate_key(paragraph)) not in identities:
                        identities.add(identity)
                        lines[self._choose_split(path)].append(words.lower_words(paragraph))
        vocabulary = words.build_vocabulary(lines["train"], MIN_WORD_COUNT)
        numbers = {word: number for number, word in enumerate(vocabulary)}
        tokens = {split: words.tokenize_lines(part, numbers) for split, part in lines.items()}
        more = {"packages": versions, "lines": {split: len(part) for split, part in lines.items()}}
        return TokenizedText(tokens, vocabulary, more)

    def describe(self) -> Card:
        licence = "BSD and MIT; matplotlib: its own, Apache-2.0: timm"
        card = self.text_card("Docstrings", licence, "docstrings of installed packages")
        return card.add_check_problem(self._versions)

    def _versions(self) -> dict[str, str]:
        return {name: find_distribution(name).version for name in self.packages}

    def paragraph_duplicate_key(self, paragraph: str) -> str:
        """Return a paragraph's key; later paragraphs with an equal key are dropped."""
        return paragraph

    def _choose_split(self, path: str) -> str:
        position = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) / 2**32
        if position < self.test:
            return "test"
        if position < self.test + self.validation:
            return "validation"
        return "train"


class Docstrings(DocstringSourceBase):
    """Paragraphs of prose without duplicates, one per line, in the order of packages and files.

    A file's split depends on the sha256 of its path in the package, so a new release of one package
    moves no file of another. Words below MIN_WORD_COUNT training occurrences are ``<unk>``.
    """

    kind: Literal["docstrings"] = "docstrings"


def find_distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise UserError.at(
            "packages",
            found=f"{name}, which is not installed",
            allowed=f"installed distributions, such as {', '.join(PACKAGES)}",
        ) from error


def read_python_files(name: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every Python file of a distribution except tests, ordered by path."""
    package = find_distribution(name)
    paths = sorted(str(path) for path in package.files or () if str(path).endswith(".py"))
    for path in paths:
        if "tests" in Path(path).parts or ".." in Path(path).parts:
            continue
        file = Path(str(package.locate_file(path)))
        try:
            yield path, file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError.at(file, found=error, allowed="UTF-8") from error


def extract_docstring_prose(source: str, path: str = "source") -> Iterator[str]:
    """Yield paragraphs of prose in the docstrings of a Python file; UserError if it is invalid."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # deep nesting, too
        why = str(error) or "nested too deep"
        raise UserError(f"{path}: no Python of this version: {why}; leave it out") from None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            text = " ".join(paragraph.split())
            plain = sum(map(str.isalpha, text)) > MIN_LETTER_SHARE * len(text)
            coded = any(mark in text for mark in CODE_MARKS)
            if plain and not coded and len(text.split()) >= MIN_WORDS:
                yield text

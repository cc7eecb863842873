"""Image sets split by their authors into training and test: their source, and downloads."""

import http.client
import urllib.error
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from moecore.core import files
from moecore.data.card import Card, count_classes
from moecore.data.files.decode import resize_images_in_chunks
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.data.stratified_splits import SplitSettings, split_train, stratified_limit
from moecore.tasks.classification import Classification

LabelledImages = tuple[np.ndarray, np.ndarray]  # images uint8 (N, C, H, W) and labels int64 (N,)


class PublishedSetFacts(NamedTuple):
    """Facts of a set that need none of its files; every class has equally many images."""

    name: str
    classes: tuple[str, ...]
    channels: int
    licence: str
    source: str
    train: int  # images
    test: int


class PublishedSource(SplitSettings, Source):
    """Base of the sources of published image sets: finds, downloads, splits and writes them."""

    root: str | tuple[str, ...]
    size: int
    download: bool = Field(
        False, description="Download missing files from the authors to the first root, checked"
    )
    only_classes: tuple[str, ...] = Field(
        (), description="Names of the classes to keep; empty: all"
    )
    test_unused: bool = Field(
        False, description="Also use training images that train_limit leaves out as test images"
    )

    @model_validator(mode="after")
    def _known_classes(self) -> Self:
        classes = self.facts().classes
        named = self.only_classes
        if named and (len(set(named)) < max(2, len(named)) or not set(named) <= set(classes)):
            refusal = files.describe_refusal(
                found=", ".join(named), allowed=f"two or more of {', '.join(classes)}, each once"
            )
            raise ValueError(f"only_classes: {refusal}")
        return self

    @property
    def kept_classes(self) -> tuple[str, ...]:
        """Names of the classes whose images are kept, in the set's order."""
        classes = self.facts().classes
        return tuple(name for name in classes if name in (self.only_classes or classes))

    @abstractmethod
    def facts(self) -> PublishedSetFacts:
        """Return name, classes and sizes of the set, which are known without its files."""

    @abstractmethod
    def find_files(self, roots: list[Path]) -> Path | None:
        """Return the first folder or archive in ``roots`` with all files of the set, or None."""

    @abstractmethod
    def describe_absence(self, roots: list[Path]) -> str:
        """Return the error text for missing files: which ones, and how to get them."""

    @abstractmethod
    def fetch_files(self, root: Path) -> Path:
        """Download the set into ``root``, check it, and return its folder or archive."""

    @abstractmethod
    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        """Return the training and the test set of the authors; place: the folder or archive."""

    def describe(self) -> Card:
        facts = self.facts()
        classes = self.kept_classes
        name = facts.name
        if classes != facts.classes:
            name += f", {len(classes)} of {len(facts.classes)} classes"
        task = Classification(classes=classes)
        card = Card(name, facts.channels, self.size, task, facts.licence, facts.source)

        def count() -> dict[str, Any]:
            place, root = self._place_and_root()
            train, test = (np.arange(n) % len(facts.classes) for n in (facts.train, facts.test))
            labels = self._number_kept_classes(np.concatenate([train, test]))
            parts = {split: labels[rows] for split, rows in self._split_rows(train, test).items()}
            note = None if place else f"prepare will download it into {root}"
            return {"counts": count_classes(name, task, parts), "note": note}

        return card.complete_with(count)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write arrays and card.json; return its content. Raises UserError for missing files."""
        place, root = self._place_and_root()
        (train, train_labels), (test, test_labels) = self.read_sets(place or self.fetch_files(root))
        images = np.concatenate([train, test])
        labels = self._number_kept_classes(np.concatenate([train_labels, test_labels]))
        parts = {
            split: SplitToWrite(labels[rows], resize_images_in_chunks(images[rows], self.size))
            for split, rows in self._split_rows(train_labels, test_labels).items()
        }
        return write_images(folder, self, self.describe(), parts)

    def _number_kept_classes(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels (N,) as numbers among ``kept_classes``; −1 for all other classes."""
        if not self.only_classes:
            return labels
        classes = self.kept_classes
        numbers = [classes.index(name) if name in classes else -1 for name in self.facts().classes]
        return np.array(numbers)[labels]

    def _place_and_root(self) -> tuple[Path | None, Path]:
        """Return the folder or archive with all files, None before a download, and its target."""
        roots = files.candidate_folders(self.root)
        place = self.find_files(roots)
        if place is None and not self.download:
            raise files.UserError(self.describe_absence(roots))
        return place, roots[0]

    def _split_rows(self, labels: np.ndarray, test_labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return split → rows; the test set's rows follow the training set's."""
        train, validation = split_train(labels, self)
        all_labels = np.concatenate([labels, test_labels])
        test = np.arange(len(labels), len(all_labels))
        if self.test_unused:
            unused = np.setdiff1d(np.arange(len(labels)), np.concatenate([train, validation]))
            test = np.concatenate([test, unused])
        test = test[stratified_limit(all_labels[test], self.test_limit, self.seed)]
        # Classes are dropped last, so that their choice moves no image to another split.
        numbers = self._number_kept_classes(all_labels)
        rows = {"train": train, "validation": validation, "test": test}
        return {split: part[numbers[part] >= 0] for split, part in rows.items()}


def check_digest(path: Path, algorithm: str, expected: str, source: str) -> None:
    if (digest := files.file_checksum(path, algorithm)) != expected:
        raise files.UserError(
            f"{source}: has {algorithm} {digest}; published: {expected}. Fetch it again"
        )


def download_file(url: str, path: Path, check: Callable[[Path], object]) -> None:
    """Download ``url`` to ``path``, which appears only once ``check`` accepts the content."""
    with files.whole_file(path) as temporary:
        try:
            torch.hub.download_url_to_file(url, str(temporary), progress=False)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            ValueError,  # of a bad address in a redirection
        ) as error:
            raise files.UserError(
                f"{url}: download failed ({error}); check the network, or put the file at {path}"
            ) from error
        check(temporary)

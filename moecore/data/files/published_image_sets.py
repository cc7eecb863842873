"""Sets that their authors split into training and test: what Fashion-MNIST and CIFAR share."""

from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.files import UserError, candidate_folders
from moecore.data.files.decode import resize_images_in_chunks
from moecore.data.sources.base import PlannedData, Source, class_counts
from moecore.data.stratified_splits import SplitSettings, split_train, stratified_limit
from moecore.data.writer import DatasetInfo, SplitToWrite, write_prepared
from moecore.tasks.classification import Classification

LabelledImages = tuple[np.ndarray, np.ndarray]  # images uint8 (N, C, H, W) and labels int64 (N,)


class PublishedSetFacts(NamedTuple):
    """What is known of a set before its files are read; the authors drew as many of each class."""

    name: str
    classes: tuple[str, ...]
    channels: int
    licence: str
    source: str
    train: int  # images
    test: int


class PublishedSource(SplitSettings, Source):
    """Fields of the sources of published sets, and how each is found, fetched and written."""

    root: str | tuple[str, ...]
    size: int
    download: bool = Field(
        False, description="Fetch from the authors into the first root where it is on none; checked"
    )
    only_classes: tuple[str, ...] = Field(
        (), description="Names of the classes that each split keeps; empty: all"
    )
    test_unused: bool = Field(
        False, description="Training images that train_limit leaves out are test images, too"
    )

    @model_validator(mode="after")
    def _known_classes(self) -> Self:
        known = self.facts().classes
        named = self.only_classes
        if named and (len(set(named)) < max(2, len(named)) or not set(named) <= set(known)):
            allowed = f"two or more of {', '.join(known)}, each once"
            raise ValueError(f"only_classes: found {', '.join(named)}; allowed: {allowed}")
        return self

    @property
    def kept_classes(self) -> tuple[str, ...]:
        """Names of the classes whose images are kept, in the set's own order."""
        known = self.facts().classes
        return tuple(name for name in known if name in (self.only_classes or known))

    def facts(self) -> PublishedSetFacts:
        """Return what is known of the set."""
        raise NotImplementedError

    def find_files(self, roots: list[Path]) -> Path | None:
        """The first place that has all files."""
        raise NotImplementedError

    def describe_absence(self, roots: list[Path]) -> str:
        """Say what is lacking, and how to get it."""
        raise NotImplementedError

    def fetch_files(self, root: Path) -> Path:
        """Download the files into ``root``, checked; return the place of all."""
        raise NotImplementedError

    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        """The authors' training and test sets. Raises UserError where a file is damaged."""
        raise NotImplementedError

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on missing or damaged files."""
        place, root = self._place_and_root()
        (train, train_labels), (test, test_labels) = self.read_sets(place or self.fetch_files(root))
        facts = self.facts()
        info = DatasetInfo(
            self._title, self._task, facts.channels, self.size, facts.licence, facts.source, self
        )
        images = np.concatenate([train, test])
        labels = self._number_kept_classes(np.concatenate([train_labels, test_labels]))
        parts = {
            split: SplitToWrite(labels[rows], resize_images_in_chunks(images[rows], self.size))
            for split, rows in self._split_rows(train_labels, test_labels).items()
        }
        return write_prepared(folder, info, parts)

    def preview(self) -> PlannedData:
        """Return what ``prepare`` would write; no file is read."""
        planned = PlannedData(self._title, self.facts().channels, self.size, self._task)
        return planned.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        place, root = self._place_and_root()
        facts = self.facts()
        train, test = (np.arange(n) % len(facts.classes) for n in (facts.train, facts.test))
        labels = self._number_kept_classes(np.concatenate([train, test]))
        rows = self._split_rows(train, test).items()
        counted = {split: labels[part] for split, part in rows}
        return {
            "counts": class_counts(self._title, self.kept_classes, counted),
            "note": None if place else f"prepare will download it into {root}",
        }

    @property
    def _task(self) -> Classification:
        return Classification(classes=self.kept_classes)

    @property
    def _title(self) -> str:
        """The name of the set, with how many of its classes are kept."""
        facts, kept = self.facts(), self.kept_classes
        if kept == facts.classes:
            return facts.name
        return f"{facts.name}, {len(kept)} of {len(facts.classes)} classes"

    def _number_kept_classes(self, labels: np.ndarray) -> np.ndarray:
        """The labels (N,) counted among the classes that are kept; −1 for others."""
        if not self.only_classes:
            return labels
        kept = self.kept_classes
        numbers = [kept.index(name) if name in kept else -1 for name in self.facts().classes]
        return np.array(numbers)[labels]

    def _place_and_root(self) -> tuple[Path | None, Path]:
        """Where all files are, None where they are to be fetched, and the folder for that."""
        roots = candidate_folders(self.root)
        place = self.find_files(roots)
        if place is None and not self.download:
            raise UserError(self.describe_absence(roots))
        return place, roots[0]

    def _split_rows(self, labels: np.ndarray, test_labels: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of train, validation and test, in this order, of both sets one after the other.

        Classes are left out last: an image is in the same split whichever are kept.
        """
        train, validation = split_train(labels, self)
        whole = np.concatenate([labels, test_labels])
        test = np.arange(len(labels), len(whole))
        if self.test_unused:
            unused = np.setdiff1d(np.arange(len(labels)), np.concatenate([train, validation]))
            test = np.concatenate([test, unused])
        test = test[stratified_limit(whole[test], self.test_limit, self.seed)]
        numbers = self._number_kept_classes(whole)
        rows = {"train": train, "validation": validation, "test": test}
        return {split: part[numbers[part] >= 0] for split, part in rows.items()}

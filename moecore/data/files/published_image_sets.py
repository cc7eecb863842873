"""Sets that their authors split into training and test: what Fashion-MNIST and CIFAR share."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.core.raw_data_lookup import candidate_folders
from moecore.data.expected_data import PlannedData, class_counts
from moecore.data.files.decode import resize_images
from moecore.data.sources.base import Source
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
        train, test = self.read_sets(place or self.fetch_files(root))
        facts = self.facts()
        task = Classification(classes=facts.classes)
        info = DatasetInfo(
            facts.name, task, facts.channels, self.size, facts.licence, facts.source, self
        )
        rows = self._split_rows(train[1], test[1])
        parts = {}
        for split, (images, labels) in zip(rows, (train, train, test), strict=True):
            resized = resize_images(images[rows[split]], self.size)
            parts[split] = SplitToWrite(labels[rows[split]], resized)
        return write_prepared(folder, info, parts)

    def preview(self) -> PlannedData:
        """Return what ``prepare`` would write; no file is read."""
        facts = self.facts()
        task = Classification(classes=facts.classes)
        return PlannedData(facts.name, facts.channels, self.size, task).complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        place, root = self._place_and_root()
        facts = self.facts()
        train, test = (np.arange(n) % len(facts.classes) for n in (facts.train, facts.test))
        rows = self._split_rows(train, test)
        labels = {
            split: part[rows[split]] for split, part in zip(rows, (train, train, test), strict=True)
        }
        return {
            "counts": class_counts(facts.name, facts.classes, labels),
            "note": None if place else f"prepare will download it into {root}",
        }

    def _place_and_root(self) -> tuple[Path | None, Path]:
        """Where all files are, None where they are to be fetched, and the folder for that."""
        roots = candidate_folders(self.root)
        place = self.find_files(roots)
        if place is None and not self.download:
            raise UserError(self.describe_absence(roots))
        return place, roots[0]

    def _split_rows(self, labels: np.ndarray, test_labels: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of train, validation and test, in this order."""
        train, validation = split_train(labels, self)
        test = stratified_limit(test_labels, self.test_limit, self.seed)
        return {"train": train, "validation": validation, "test": test}

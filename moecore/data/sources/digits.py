"""scikit-learn's digits: 1,797 grey images, 8×8 (UCI, Alpaydin & Kaynak 1998)."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from moecore.data import stratified_splits
from moecore.data.card import Card, count_by_split_and_class
from moecore.data.files.decode import resize_images_in_chunks
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.tasks.classification import Classification

TASK = Classification(classes=tuple("0123456789"))
IMAGES_PER_CLASS = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)  # per class


class Digits(stratified_splits.SplitSettings, Source):
    """Digits of scikit-learn; the test set is drawn by the seed, stratified by class."""

    kind: Literal["digits"] = "digits"
    size: int = Field(8, ge=4, le=1024, description="Height and width, pixels; bilinear if not 8")
    test: float = Field(0.2, gt=0, lt=1, description="Share of each class for the test split")

    def describe(self) -> Card:
        source = "scikit-learn load_digits (UCI, doi 10.24432/C50P49)"
        card = Card("Digits", 1, self.size, TASK, "CC BY 4.0", source)
        labels = np.repeat(np.arange(10), IMAGES_PER_CLASS)

        def count() -> dict[str, Any]:
            parts = {name: labels[rows] for name, rows in self._splits(labels).items()}
            return {"counts": count_by_split_and_class(card.name, TASK, parts)}

        return card.fill_or_set_problem(count)

    def write(self, folder: Path) -> dict[str, Any]:
        from sklearn.datasets import load_digits  # takes a second to import

        flat, classes = load_digits(return_X_y=True)
        grey = np.asarray(flat).reshape(-1, 8, 8)  # 0 to 16
        images = np.rint(grey * (255 / 16)).astype(np.uint8)[:, None]
        labels = np.asarray(classes).astype(np.int64)
        parts = {
            name: SplitToWrite(labels[rows], resize_images_in_chunks(images[rows], self.size))
            for name, rows in self._splits(labels).items()
        }
        return write_images(folder, self, self.describe(), parts)

    def _splits(self, labels: np.ndarray) -> dict[str, np.ndarray]:
        rest, test = stratified_splits.stratified_split(labels, self.test, self.seed, purpose=2)
        test = test[stratified_splits.stratified_limit(labels[test], self.test_limit, self.seed)]
        train, validation = stratified_splits.split_train(labels[rest], self)
        return {"train": rest[train], "validation": rest[validation], "test": test}

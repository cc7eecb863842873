"""scikit-learn's digits: 1,797 grey images, 8×8 (UCI, Alpaydin & Kaynak 1998)."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from moecore.data.files.decode import resize_images_in_chunks
from moecore.data.sources.base import PlannedData, Source, class_counts
from moecore.data.stratified_splits import (
    SplitSettings,
    split_train,
    stratified_limit,
    stratified_split,
)
from moecore.data.writer import DatasetInfo, SplitToWrite, write_prepared
from moecore.tasks.classification import Classification

TASK = Classification(classes=tuple("0123456789"))
IMAGES = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)  # of each class


class Digits(SplitSettings, Source):
    """Needs no download; the test set is drawn by the seed, stratified by class."""

    kind: Literal["digits"] = "digits"
    size: int = Field(
        8, ge=4, le=1024, description="Height and width in pixels; bilinear where not 8"
    )
    test: float = Field(0.2, gt=0, lt=1, description="Share of each class for the test split")

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout to ``folder`` and return its card."""
        from sklearn.datasets import load_digits  # a second of import, needed only here

        flat, classes = load_digits(return_X_y=True)
        grey = np.asarray(flat).reshape(-1, 8, 8)  # 0 to 16
        images = np.rint(grey * (255 / 16)).astype(np.uint8)[:, None]
        labels = np.asarray(classes).astype(np.int64)
        parts = self._splits(labels)
        facts = DatasetInfo(
            "Digits",
            TASK,
            1,
            self.size,
            "CC BY 4.0",
            "scikit-learn load_digits (UCI, doi 10.24432/C50P49)",
            self,
        )
        return write_prepared(
            folder,
            facts,
            {
                name: SplitToWrite(labels[part], resize_images_in_chunks(images[part], self.size))
                for name, part in parts.items()
            },
        )

    def preview(self) -> PlannedData:
        """Return what ``prepare`` would write; the numbers of each class are known."""
        return PlannedData("Digits", 1, self.size, TASK).complete_with(self._known)

    def _known(self) -> dict[str, Any]:
        labels = np.repeat(np.arange(10), IMAGES)
        parts = {name: labels[rows] for name, rows in self._splits(labels).items()}
        return {"counts": class_counts("Digits", TASK.classes, parts)}

    def _splits(self, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of each split, int64."""
        rest, test = stratified_split(labels, self.test, self.seed, purpose=2)
        test = test[stratified_limit(labels[test], self.test_limit, self.seed)]
        train, validation = (rest[part] for part in split_train(labels[rest], self))
        return {"train": train, "validation": validation, "test": test}

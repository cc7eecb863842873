"""Sets that their authors split into training and test: what Fashion-MNIST and CIFAR share."""

from pathlib import Path
from typing import Any

import numpy as np

from moecore.data.files.decode import resize_images
from moecore.data.preview import class_counts
from moecore.data.splits import SplitSettings, split_train, stratified_limit
from moecore.data.writer import DatasetInfo, SplitPart, write_prepared

LabelledImages = tuple[np.ndarray, np.ndarray]  # images uint8 (N, C, H, W) and labels int64 (N,)


def write_published_set(
    folder: Path,
    info: DatasetInfo,
    settings: SplitSettings,
    train: LabelledImages,
    test: LabelledImages,
) -> dict[str, Any]:
    """Write the prepared layout of a set to ``folder`` and return its card."""
    rows = _split_rows(settings, train[1], test[1])
    sets = {"train": train, "validation": train, "test": test}
    parts = {}
    for split, (images, labels) in sets.items():
        chosen = rows[split]
        parts[split] = SplitPart(labels[chosen], resize_images(images[chosen], info.size))
    return write_prepared(folder, info, parts)


def count_published_set(
    name: str, classes: tuple[str, ...], settings: SplitSettings, train: int, test: int
) -> dict[str, tuple[int, ...]]:
    """Return the images of each class in each split; the authors drew as many of each class.

    train, test: images of the authors' two sets.
    """
    labels, test_labels = (np.arange(number) % len(classes) for number in (train, test))
    rows = _split_rows(settings, labels, test_labels)
    parts = {split: labels[rows[split]] for split in ("train", "validation")}
    return class_counts(name, classes, parts | {"test": test_labels[rows["test"]]})


def _split_rows(
    settings: SplitSettings, labels: np.ndarray, test_labels: np.ndarray
) -> dict[str, np.ndarray]:
    train, validation = split_train(labels, settings)
    test = stratified_limit(test_labels, settings.test_limit, settings.seed)
    return {"train": train, "validation": validation, "test": test}

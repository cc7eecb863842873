"""Writes the prepared layout (see moecore/data/prepared.py) from any source, streaming, and counts and hashes what it wrote."""

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.config import Config
from moecore.data.arrays import check_array
from moecore.data.checksum import checksum
from moecore.data.prepared import SPLITS, class_counts
from moecore.files import StageError, write_json


class Facts(NamedTuple):
    """What a source knows of its data before any image is written; ``settings`` is the source's own config."""

    name: str
    classes: tuple[str, ...]
    channels: int
    size: int
    licence: str
    source: str
    settings: Config  # with a kind and a seed


class Part(NamedTuple):
    """One split to write: labels (N,) int64, or (N, K) uint8 of 0 and 1 for images with several labels, and the images in the same order.

    images: chunks uint8 (n, C, H, W) whose n add up to N, or the path of a finished .npy file that is taken over.
    """

    labels: np.ndarray
    images: Iterable[np.ndarray] | Path


def write_prepared(folder: Path, facts: Facts, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Write the three splits and ``card.json`` to ``folder`` (made where missing) and return the card.

    Raises StageError on labels out of range or of two forms, classes without an image, and images that do not fit the labels or the size.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    multi = parts["train"].labels.ndim == 2
    counts = {split: _counts(facts, split, parts[split].labels, multi) for split in SPLITS}
    for split in SPLITS:
        _write_images(folder / f"{split}_images.npy", facts, parts[split])
        np.save(folder / f"{split}_labels.npy", parts[split].labels.astype(np.uint8 if multi else np.int64), allow_pickle=False)
    mean, std = moments(np.load(folder / "train_images.npy", mmap_mode="r", allow_pickle=False))
    settings = facts.settings.model_dump(mode="json")
    card = {
        "name": facts.name, "kind": settings["kind"], "classes": list(facts.classes), "channels": facts.channels, "size": facts.size,
        "counts": counts, "mean": mean, "std": std, "seed": settings["seed"], "licence": facts.licence, "source": facts.source,
        "files": {name: checksum(folder / name) for name in file_names()}, "settings": settings,
    }
    if multi:
        card |= {"labels": "multi", "images": {split: len(parts[split].labels) for split in SPLITS}}
    write_json(folder / "card.json", card)
    return card


def file_names() -> list[str]:
    """Names of the six array files of a prepared folder."""
    return [f"{split}_{what}.npy" for split in SPLITS for what in ("images", "labels")]


def moments(images: np.ndarray, chunk: int = 8192) -> tuple[list[float], list[float]]:
    """Mean and population standard deviation per channel of images uint8 (N, C, H, W), in [0, 1]; exact, from histograms."""
    histogram = np.zeros((images.shape[1], 256), np.int64)
    for start in range(0, len(images), chunk):
        block = images[start : start + chunk]
        for channel in range(images.shape[1]):
            histogram[channel] += np.bincount(block[:, channel].ravel(), minlength=256)
    values, share = np.arange(256) / 255, histogram / histogram.sum(1, keepdims=True)
    mean = share @ values
    return mean.tolist(), np.sqrt(np.maximum(share @ values**2 - mean**2, 0)).tolist()


def _counts(facts: Facts, split: str, labels: np.ndarray, multi: bool) -> dict[str, int]:
    if len(set(facts.classes)) != len(facts.classes):
        raise StageError(f"{facts.name}: two classes have the same name")
    _check_labels(facts, split, labels, multi)
    counts = class_counts(labels, len(facts.classes))
    if empty := [name for name, count in zip(facts.classes, counts, strict=True) if count == 0]:
        missing = ", ".join(empty)
        raise StageError(f"{facts.name}: no image in {split} of class {missing}; every class needs one in every split (see validation, limits)")
    return dict(zip(facts.classes, counts, strict=True))


def _check_labels(facts: Facts, split: str, labels: np.ndarray, multi: bool) -> None:
    """Raise StageError unless the labels are classes (N,), or with ``multi`` sets of at least one class, (N, K) of 0 and 1."""
    classes = len(facts.classes)
    if multi != (labels.ndim == 2) or multi and labels.shape[1] != classes:
        allowed = f"(images, {classes}) in every split, or (images,) in every split"
        raise StageError(f"{facts.name}: labels of {split} have the shape {labels.shape}; allowed: {allowed}")
    if multi and (not np.isin(labels, (0, 1)).all() or not labels.any(axis=1).all()):
        raise StageError(f"{facts.name}: labels of {split} are not sets of classes; allowed: 0 and 1, with a 1 for each image")
    if not multi and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise StageError(f"{facts.name}: labels of {split} run from {labels.min()} to {labels.max()}; allowed: 0 to {classes - 1}")


def _write_images(path: Path, facts: Facts, part: Part) -> None:
    shape = (len(part.labels), facts.channels, facts.size, facts.size)
    if isinstance(part.images, Path):
        _take_over(part.images, path)
        return check_array(path, shape, np.uint8)
    out, row = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape), 0
    for chunk in part.images:
        if chunk.dtype != np.uint8 or chunk.shape[1:] != shape[1:] or row + len(chunk) > shape[0]:
            raise StageError(f"{path.name}: images {row} on are {chunk.dtype} {chunk.shape}; expected uint8 {shape} in all")
        out[row : row + len(chunk)] = chunk
        row += len(chunk)
    if row != shape[0]:
        raise StageError(f"{path.name}: {row} images for {shape[0]} labels")
    out.flush()


def _take_over(source: Path, path: Path) -> None:
    try:
        os.replace(source, path)
    except OSError as error:
        if error.errno != errno.EXDEV:  # another file system: it has to be copied
            raise
        shutil.copyfile(source, path)
        source.unlink()

"""Writes the prepared layout (see moecore/data/prepared.py) from any source, streaming.

Counts and hashes what it wrote.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, write_sealed
from moecore.data.prepared import SPLITS
from moecore.data.stored_arrays import jpeg_store_file_names, new_array, open_array, save_array
from moecore.data.thread_map import map_in_threads
from moecore.tasks.base import Task


class DatasetInfo(NamedTuple):
    """What a source knows of its data before any image is written."""

    name: str
    task: Task
    channels: int
    size: int
    licence: str
    source: str
    settings: Config  # the source's own, with a kind and a seed
    truth: int = 0  # kinds of tokens that one more channel of the images names

    @property
    def stored_channels(self) -> int:
        """Channels of an image as it is written."""
        return self.channels + bool(self.truth)


class PackedJpegFile(NamedTuple):
    """A finished file of N JPEG files, one after the other, that is taken over."""

    path: Path
    lengths: np.ndarray  # int64 (N,), bytes
    histogram: np.ndarray  # int64 (C, 256) of all pixels before they were compressed
    short_side: int


class SplitToWrite(NamedTuple):
    """One split to write: its labels, as the task stores them, and the images in the same order.

    images: chunks uint8 (n, C, H, W) whose n add up to N, or a finished .npy or JPEG file that is
    taken over.
    """

    labels: np.ndarray
    images: Iterable[np.ndarray] | Path | PackedJpegFile


def write_prepared(
    folder: Path, facts: DatasetInfo, parts: Mapping[str, SplitToWrite]
) -> dict[str, Any]:
    """Write the three splits and ``card.json`` to ``folder`` (made where missing); the card.

    Raises UserError on labels that are not the task's, classes without an image, and images that do
    not fit the labels or the size.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {split: _count_classes(facts, split, parts[split].labels) for split in SPLITS}
    names = []
    for split in SPLITS:
        labels, images = parts[split]
        if isinstance(images, PackedJpegFile):
            _write_jpegs(folder, split, len(labels), images)
            names += jpeg_store_file_names(split)
        else:
            names.append(f"{split}_images.npy")
            _write_images(folder / names[-1], facts, len(labels), images)
        names.append(f"{split}_labels.npy")
        _, dtype = facts.task.storage_format(len(labels))
        save_array(folder / f"{split}_labels.npy", labels.astype(dtype))
    packed = parts["train"].images
    if isinstance(packed, PackedJpegFile):
        mean, std = _moments_of(packed.histogram)
        jpeg = {"jpeg": {"side": packed.short_side}}
    else:
        stored = np.load(folder / "train_images.npy", mmap_mode="r", allow_pickle=False)
        mean, std = channel_moments(stored[:, : facts.channels])
        jpeg = {}
    settings = facts.settings.model_dump(mode="json")
    card = {
        "name": facts.name,
        "kind": settings["kind"],
        "task": facts.task.model_dump(mode="json"),
        "channels": facts.channels,
        "size": facts.size,
        "images": {split: len(parts[split].labels) for split in SPLITS},
        "counts": counts,
        "mean": mean,
        "std": std,
        "seed": settings["seed"],
        "licence": facts.licence,
        "source": facts.source,
        "files": {name: file_checksum(folder / name) for name in names},
        "settings": settings,
        **({"truth": facts.truth} if facts.truth else {}),
        **jpeg,
    }
    write_sealed(folder / "card.json", card)
    return card


def channel_moments(images: np.ndarray, chunk: int = 512) -> tuple[list[float], list[float]]:
    """Mean and population standard deviation per channel of images uint8 (N, C, H, W), in [0, 1].

    Exact, from histograms, which PIL counts several times as quickly as numpy.
    """
    channels, width = images.shape[1], images.shape[-1]

    def counted(start: int) -> np.ndarray:
        block = images[start : start + chunk]
        planes = [block[:, channel].reshape(-1, width) for channel in range(channels)]
        return np.array([Image.fromarray(plane).histogram() for plane in planes], np.int64)

    histogram = np.zeros((channels, 256), np.int64)
    for counts in map_in_threads(counted, range(0, len(images), chunk)):
        histogram += counts
    return _moments_of(histogram)


def _moments_of(histogram: np.ndarray) -> tuple[list[float], list[float]]:
    values = np.arange(256) / 255
    share = histogram / histogram.sum(1, keepdims=True)
    mean = share @ values
    return mean.tolist(), np.sqrt(np.maximum(share @ values**2 - mean**2, 0)).tolist()


def _count_classes(facts: DatasetInfo, split: str, labels: np.ndarray) -> dict[str, int]:
    classes = facts.task.classes
    if len(set(classes)) != len(classes):
        raise UserError(f"{facts.name}: two classes have the same name")
    facts.task.check(labels, f"{facts.name}: labels of {split}")
    counts = dict(zip(classes, facts.task.counts(labels), strict=True))
    if empty := [name for name, count in counts.items() if count == 0]:
        missing = f"no image in {split} of class {', '.join(empty)}"
        allowed = "every class needs one in every split (see validation, limits)"
        raise UserError(f"{facts.name}: {missing}; {allowed}")
    return counts


def _write_jpegs(folder: Path, split: str, labels: int, images: PackedJpegFile) -> None:
    if len(images.lengths) != labels:
        raise UserError(f"{split}: {len(images.lengths)} images for {labels} labels")
    content, offsets = (folder / name for name in jpeg_store_file_names(split))
    shutil.move(images.path, content)
    save_array(offsets, np.concatenate([[0], images.lengths.cumsum()]))


def _write_images(
    path: Path, facts: DatasetInfo, labels: int, images: Iterable[np.ndarray] | Path
) -> None:
    shape = (labels, facts.stored_channels, facts.size, facts.size)
    if isinstance(images, Path):
        shutil.move(images, path)
        open_array(path, shape, np.uint8)
        return
    out = new_array(path, np.uint8, shape)
    row = 0
    for chunk in images:
        if chunk.dtype != np.uint8 or chunk.shape[1:] != shape[1:] or row + len(chunk) > shape[0]:
            wrong = f"images {row} on are {chunk.dtype} {chunk.shape}"
            raise UserError(f"{path.name}: {wrong}; expected uint8 {shape} in all")
        out[row : row + len(chunk)] = chunk
        row += len(chunk)
    if row != shape[0]:
        raise UserError(f"{path.name}: {row} images for {shape[0]} labels")
    out.flush()

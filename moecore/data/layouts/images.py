"""Flat images ``{train,validation,test}_images.npy``, uint8 (N, C, H, W), and ``…_labels.npy``.

If the card says ``jpeg``: JPEG files in train_images.bin, train_offsets.npy int64 (N + 1,).
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.card import (
    PREPARE_AGAIN,
    SPLITS,
    Card,
    count_by_split_and_class,
    new_memmap,
    open_array,
    open_labels,
    save_array,
    write_card,
)
from moecore.data.thread_map import map_in_threads, thread_count
from moecore.tasks.base import Task


class PackedJpegFacts(NamedTuple):
    """Facts of a file of N concatenated JPEG files, which is moved to the prepared folder."""

    path: Path
    lengths: np.ndarray  # int64 (N,), bytes
    histogram: np.ndarray  # int64 (C, 256) of all pixels before compression
    short_side: int


class SplitToWrite(NamedTuple):
    """Labels for the task, and images to write: chunks uint8 (n, C, H, W), .npy or JPEG file."""

    labels: np.ndarray
    images: Iterable[np.ndarray] | Path | PackedJpegFacts


def write_images(
    folder: Path,
    settings: Config,
    card: Card,
    parts: Mapping[str, SplitToWrite],
    counts: Mapping[str, Mapping[str, int]] | None = None,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the three splits and ``card.json`` to ``folder`` (created if missing).

    Args:
        folder: Where to write.
        settings: The source's settings, with a kind and a seed.
        card: The source's card; its ``counts`` are counted again.
        parts: The splits train, validation and test.
        counts: Counts of each split for the card, where they are not counts of classes.
        files: Names of other files of ``folder`` that belong to the data.

    Returns:
        The content of card.json.

    Raises:
        UserError: For a card with a problem, labels that are not the task's, classes without an
            image, and images that do not fit the labels or the size.
    """
    task = card.check_has_no_problem().task
    assert task is not None
    folder.mkdir(parents=True, exist_ok=True)
    if len(set(task.classes)) != len(task.classes):
        raise UserError(f"{card.name}: two classes have the same name")
    for split in SPLITS:
        task.check(parts[split].labels, f"{card.name}: labels of {split}")
    counted = count_by_split_and_class(card.name, task, {key: parts[key].labels for key in SPLITS})
    names = list(files)
    for split in SPLITS:
        labels, images = parts[split]
        if isinstance(images, PackedJpegFacts):
            names += _move_jpegs(folder, split, len(labels), images)
        else:
            names.append(f"{split}_images.npy")
            _write_array(folder / names[-1], card, len(labels), images)
        names.append(f"{split}_labels.npy")
        save_array(folder / names[-1], labels.astype(task.storage_format(len(labels))[1]))
    if counts is None:
        counts = {split: dict(zip(task.classes, counted[split], strict=True)) for split in SPLITS}
    return write_card(
        folder,
        settings,
        card,
        names,
        images={split: len(parts[split].labels) for split in SPLITS},
        counts=counts,
        seed=settings.model_dump().get("seed", 0),
        **_describe_training_images(folder, card, parts["train"]),
    )


def _describe_training_images(folder: Path, card: Card, train: SplitToWrite) -> dict[str, Any]:
    """Return card entries: ``mean`` and ``std`` per channel, and ``jpeg`` for uncropped images."""
    if isinstance(train.images, PackedJpegFacts):
        mean, std = _histogram_moments(train.images.histogram)
        return {"mean": mean, "std": std, "jpeg": {"side": train.images.short_side}}
    stored = np.load(folder / "train_images.npy", mmap_mode="r", allow_pickle=False)
    mean, std = channel_moments(stored[:, : card.channels])
    return {"mean": mean, "std": std}


def channel_moments(images: np.ndarray, chunk: int = 512) -> tuple[list[float], list[float]]:
    """Return each channel's exact mean and SD of uint8 images (N, C, H, W) scaled to [0, 1]."""
    from PIL import Image

    channels = images.shape[1]
    width = images.shape[-1]

    # PIL counts histograms several times faster than numpy.
    def count_chunk(start: int) -> np.ndarray:
        block = images[start : start + chunk]
        planes = [block[:, channel].reshape(-1, width) for channel in range(channels)]
        return np.array([Image.fromarray(plane).histogram() for plane in planes], np.int64)

    histogram = np.zeros((channels, 256), np.int64)
    for counts in map_in_threads(count_chunk, range(0, len(images), chunk)):
        histogram += counts
    return _histogram_moments(histogram)


def _histogram_moments(histogram: np.ndarray) -> tuple[list[float], list[float]]:
    values = np.arange(256) / 255
    share = histogram / histogram.sum(1, keepdims=True)
    mean = share @ values
    return mean.tolist(), np.sqrt(np.maximum(share @ values**2 - mean**2, 0)).tolist()


def _jpeg_file_names(split: str) -> list[str]:
    return [f"{split}_images.bin", f"{split}_offsets.npy"]


def _move_jpegs(folder: Path, split: str, labels: int, images: PackedJpegFacts) -> list[str]:
    """Move the JPEG file to the folder and write its offsets; return the two file names."""
    if len(images.lengths) != labels:
        raise UserError(f"{split}: {len(images.lengths)} images for {labels} labels")
    content, offsets = names = _jpeg_file_names(split)
    shutil.move(images.path, folder / content)
    save_array(folder / offsets, np.concatenate([[0], images.lengths.cumsum()]))
    return names


def _write_array(path: Path, card: Card, labels: int, images: Iterable[np.ndarray] | Path) -> None:
    shape = (labels, card.stored_channels, *card.shape)
    if isinstance(images, Path):
        shutil.move(images, path)
        open_array(path, shape, np.uint8)
        return
    array = new_memmap(path, np.uint8, shape)
    row = 0
    for chunk in images:
        if chunk.dtype != np.uint8 or chunk.shape[1:] != shape[1:] or row + len(chunk) > shape[0]:
            raise UserError(
                f"{path.name}: images {row} on are {chunk.dtype} {chunk.shape}; "
                f"expected uint8 {shape} in all"
            )
        array[row : row + len(chunk)] = chunk
        row += len(chunk)
    if row != shape[0]:
        raise UserError(f"{path.name}: {row} images for {shape[0]} labels")
    array.flush()


def open_image_split(
    folder: Path, card: Mapping[str, Any], task: Task, split: str
) -> "tuple[np.ndarray | JpegImages, np.ndarray]":
    """Open a split's images (N, C, H, W) and labels; UserError if they do not fit card.json."""
    number = card["images"][split]
    shape = (number, card["channels"] + bool(card.get("truth")), card["size"], card["size"])
    if split == "train" and "jpeg" in card:
        images = JpegImages.open(folder, split, number, card)
    else:
        images = open_array(folder / f"{split}_images.npy", shape, np.uint8)
    return images, open_labels(folder, task, split, number)


# Behaves like an array uint8 (N, C, S, S) of their centre squares; an index array selects images
# without decoding, ``numpy.asarray`` decodes. ``decode_uncropped`` returns all pixels.
@dataclass(frozen=True)
class JpegImages:
    """N images of different shapes, stored as JPEG files in one file."""

    path: Path
    content: np.ndarray  # uint8 (bytes,), memory-mapped
    places: np.ndarray  # int64 (N,): positions of these images in the file
    offsets: np.ndarray  # int64 (images in the file + 1,): where each begins, and the last one ends
    size: int  # S
    channels: int
    dtype = np.dtype(np.uint8)
    ndim = 4

    @classmethod
    def open(cls, folder: Path, split: str, number: int, card: Mapping[str, Any]) -> "JpegImages":
        """Open a split of ``number`` images; UserError if its file has a wrong length."""
        path, offsets = (folder / name for name in _jpeg_file_names(split))
        starts = np.array(open_array(offsets, (number + 1,), np.int64))
        size = path.stat().st_size if path.is_file() else 0
        if size != starts[-1]:
            raise UserError(f"{path}: expected {starts[-1]} bytes, found {size}; {PREPARE_AGAIN}")
        content = np.memmap(path, np.uint8, "r")
        return cls(path, content, np.arange(number), starts, card["size"], card["channels"])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self.places), self.channels, self.size, self.size)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: Any) -> Any:
        """Return a centre square uint8 (C, S, S) for an int, else undecoded JpegImages."""
        if isinstance(key, (int, np.integer)):
            return self._decode_square(self.places[key])
        return replace(self, places=self.places[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        squares = list(_decoding_thread_pool(thread_count()).map(self._decode_square, self.places))
        array = np.stack(squares) if squares else np.empty(self.shape, np.uint8)
        return array if dtype is None else array.astype(dtype, copy=False)

    def decode_uncropped(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the uncropped images at ``rows``, uint8 (H, W, C); UserError for damaged ones."""
        return list(_decoding_thread_pool(thread_count()).map(self._uncropped, self.places[rows]))

    def _uncropped(self, place: int) -> np.ndarray:
        pixels = np.asarray(self._decode_picture(place))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def _decode_square(self, place: int) -> np.ndarray:
        from moecore.data.files.decode import resize_centre_square  # loads PIL

        return resize_centre_square(self._decode_picture(place), self.size).transpose(2, 0, 1)

    def _decode_picture(self, place: int) -> Any:  # PIL's Image
        from moecore.data.files.decode import UnreadableImage, decode_jpeg_to_pil  # loads PIL

        start, stop = self.offsets[place : place + 2]
        try:
            return decode_jpeg_to_pil(self.content[start:stop].tobytes(), self.channels)
        except UnreadableImage as error:
            raise UserError(
                f"{self.path}: image {place} (bytes {start} to {stop}) cannot be decoded: {error}; "
                f"{PREPARE_AGAIN}"
            ) from error


@lru_cache(maxsize=1)
def _decoding_thread_pool(number: int) -> ThreadPoolExecutor:
    """Return a pool of ``number`` decoding threads; cached, since every batch needs it."""
    return ThreadPoolExecutor(number, "jpeg")

"""Prepared data on disk: ``{train,validation,test}_images.npy`` uint8 (N, C, H, W), ``…_labels.npy``, ``card.json``.

Labels are int64 (N,), or uint8 (N, K) of 0 and 1 where an image may have several of the K classes: then the card says
``labels: multi`` and counts how often each class occurs, and ``images`` says how many images each split has.

The card says everything about the set: name, kind, classes, channels, size, counts, mean and std of the training images,
seed, licence, source, sha256 of each file, and the settings that made it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.data.checksum import checksum
from moecore.files import StageError, read_json

SPLITS = ("train", "validation", "test")
CARD_KEYS = ("name", "kind", "classes", "channels", "size", "counts", "mean", "std", "seed", "licence", "source", "files", "settings")


class Split(NamedTuple):
    """One split: images uint8 (N, C, H, W), memory-mapped, and labels int64 (N,) or uint8 (N, K)."""

    images: np.ndarray
    labels: np.ndarray


def spread(total: int, number: int | None) -> np.ndarray:
    """``number`` indices evenly spread over ``total``, so that a set sorted by class gives every class; all where there are fewer or it is None."""
    return np.unique(np.linspace(0, total - 1, min(number or total, total)).astype(int))


class Prepared(NamedTuple):
    """An opened prepared folder."""

    card: dict[str, Any]
    train: Split
    validation: Split
    test: Split

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return is_multi_label(self.card)

    @staticmethod
    def open(folder: str | Path, verify: bool = False) -> "Prepared":
        """Open a prepared folder and hold every file against the card; ``verify`` also compares the sha256 of each.

        Raises StageError naming the file, what the card says and what was found.
        """
        folder = Path(folder)
        card = read_json(folder / "card.json")
        wanted = (*CARD_KEYS, "images") if is_multi_label(card) else CARD_KEYS
        if lacking := [key for key in wanted if key not in card]:
            raise StageError(f"{folder / 'card.json'}: lacks {', '.join(lacking)}; run the stage `prepare` again")
        if verify:
            _verify(folder, card)
        return Prepared(card, *(_open_split(folder, card, split) for split in SPLITS))


def is_multi_label(card: dict[str, Any]) -> bool:
    """Whether the card is of a set whose images may have several labels."""
    return card.get("labels") == "multi"


def class_counts(labels: np.ndarray, classes: int) -> list[int]:
    """How many images have each class; labels (N,) or (N, K) of 0 and 1. What is no class counts for none."""
    if labels.ndim == 2:
        return labels.sum(axis=0, dtype=np.int64).tolist()
    return np.bincount(labels[labels >= 0], minlength=classes).tolist()


def _open_split(folder: Path, card: dict[str, Any], split: str) -> Split:
    counts = card["counts"][split]
    images, labels, classes, multi = folder / f"{split}_images.npy", folder / f"{split}_labels.npy", card["classes"], is_multi_label(card)
    number = card["images"][split] if multi else sum(counts.values())
    check_array(images, (number, card["channels"], card["size"], card["size"]), np.uint8)
    check_array(labels, (number, len(classes)) if multi else (number,), np.uint8 if multi else np.int64)
    values = np.load(labels, allow_pickle=False)
    if class_counts(values, len(classes)) != [counts[name] for name in classes]:
        raise StageError(f"{labels}: its class counts are not those of card.json; run the stage `prepare` again")
    return Split(np.load(images, mmap_mode="r", allow_pickle=False), values)


def check_array(path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise StageError, naming the file, unless it is a whole .npy file with this shape and dtype."""
    if not path.is_file():
        raise StageError(f"{path}: no such file; run the stage `prepare` again")
    try:
        with open(path, "rb") as handle:
            np.lib.format.read_magic(handle)
            found, _, kind = np.lib.format.read_array_header_1_0(handle)
            expected = handle.tell() + int(np.prod(found, dtype=np.int64)) * kind.itemsize
    except ValueError as error:
        raise StageError(f"{path}: not a whole .npy file ({path.stat().st_size} bytes: {error}); run the stage `prepare` again") from error
    if (size := path.stat().st_size) != expected:
        raise StageError(f"{path}: expected {expected} bytes, found {size}; run the stage `prepare` again")
    if found != shape or kind != dtype:
        raise StageError(f"{path}: holds {kind} {found}; card.json says {np.dtype(dtype)} {shape}. Run the stage `prepare` again")


def _verify(folder: Path, card: dict[str, Any]) -> None:
    for name, expected in card["files"].items():
        path = folder / name
        if not path.is_file():
            raise StageError(f"{path}: no such file; run the stage `prepare` again")
        if (found := checksum(path)) != expected:
            raise StageError(f"{path}: has sha256 {found}; card.json says {expected}. Run the stage `prepare` again")

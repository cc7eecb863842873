"""Prepared data on disk: ``{train,validation,test}_images.npy`` uint8 (N, C, H, W), ``…_labels.npy`` int64 (N,), ``card.json``.

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
    """One split: images uint8 (N, C, H, W), memory-mapped, and labels int64 (N,)."""

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

    @staticmethod
    def open(folder: str | Path, verify: bool = False) -> "Prepared":
        """Open a prepared folder and hold every file against the card; ``verify`` also compares the sha256 of each.

        Raises StageError naming the file, what the card says and what was found.
        """
        folder = Path(folder)
        card = read_json(folder / "card.json")
        if lacking := [key for key in CARD_KEYS if key not in card]:
            raise StageError(f"{folder / 'card.json'}: lacks {', '.join(lacking)}; run the stage `prepare` again")
        if verify:
            _verify(folder, card)
        return Prepared(card, *(_open_split(folder, card, split) for split in SPLITS))


def _open_split(folder: Path, card: dict[str, Any], split: str) -> Split:
    counts = card["counts"][split]
    number, images, labels = sum(counts.values()), folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
    check_array(images, (number, card["channels"], card["size"], card["size"]), np.uint8)
    check_array(labels, (number,), np.int64)
    values = np.load(labels, allow_pickle=False)
    if [int(np.sum(values == i)) for i in range(len(card["classes"]))] != [counts[name] for name in card["classes"]]:
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

"""Prepared data on disk: ``{train,validation,test}_images.npy`` uint8 (N, C, H, W), ``…_labels.npy``, ``card.json``.

Labels are int64 (N,), or uint8 (N, K) of 0 and 1 where an image may have several of the K classes: then the card says
``labels: multi`` and counts how often each class occurs, and ``images`` says how many images each split has.

Volumes with a real number each (an age) have labels float32 (N,), and the card says ``labels: real`` with the ``target`` and
its ``unit``: images are float16 (N, 1, D, H, W) in [0, 1] with a background of exactly 0, ``…_regions.npy`` are tissue shares × 255,
uint8 (N, R, D, H, W), where the card lists ``regions``, ``…_subjects.csv`` has a row a volume, and counts are by sex.

The card says everything about the set: name, kind, classes, channels, size, counts, mean and std of the training images,
seed, licence, source, sha256 of each file, and the settings that made it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.data.arrays import check_array
from moecore.data.checksum import checksum
from moecore.data.subjects import read_subjects, sex_counts
from moecore.files import StageError, read_json

SPLITS = ("train", "validation", "test")
CARD_KEYS = ("name", "kind", "classes", "channels", "size", "counts", "mean", "std", "seed", "licence", "source", "files", "settings")
REAL_KEYS = ("images", "target", "unit", "target_mean", "target_std", "target_range", "regions", "voxel_mm", "simulated", "skipped", "dtype")


class Split(NamedTuple):
    """One split: images uint8 (N, C, H, W), memory-mapped, and labels int64 (N,) or uint8 (N, K).

    Or volumes float16 (N, 1, D, H, W), memory-mapped, and real labels float32 (N,).
    """

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
    folder: Path = Path()

    @property
    def real(self) -> bool:
        """Whether labels are real numbers, as ages."""
        return is_real(self.card)

    def regions(self, split: str) -> np.ndarray:
        """Tissue shares × 255 of a split's volumes: uint8 (N, R, D, H, W), memory-mapped, R as in the card; StageError where there are none."""
        if not self.card.get("regions"):
            raise StageError(f"{self.folder}: this data has no tissue maps; allowed: a cohort prepared with maps (regions: wm, gm, csf)")
        return np.load(self.folder / f"{split}_regions.npy", mmap_mode="r", allow_pickle=False)

    def subjects(self, split: str) -> list[dict[str, str]]:
        """Participant, session, age, sex, site and flags of every volume of a split, in its order; StageError where the data has none."""
        return read_subjects(self.folder / f"{split}_subjects.csv")

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
        wanted = (*CARD_KEYS, *(REAL_KEYS if is_real(card) else ["images"] if is_multi_label(card) else ()))
        if lacking := [key for key in wanted if key not in card]:
            raise StageError(f"{folder / 'card.json'}: lacks {', '.join(lacking)}; run the stage `prepare` again")
        if verify:
            _verify(folder, card)
        open_split = _open_volumes if is_real(card) else _open_split
        return Prepared(card, *(open_split(folder, card, split) for split in SPLITS), folder)


def is_multi_label(card: dict[str, Any]) -> bool:
    """Whether the card is of a set whose images may have several labels."""
    return card.get("labels") == "multi"


def is_real(card: dict[str, Any]) -> bool:
    """Whether the card is of a set whose labels are real numbers."""
    return card.get("labels") == "real"


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


def _open_volumes(folder: Path, card: dict[str, Any], split: str) -> Split:
    images, labels, size, number = folder / f"{split}_images.npy", folder / f"{split}_labels.npy", card["size"], card["images"][split]
    check_array(images, (number, card["channels"], *size), np.float16)
    check_array(labels, (number,), np.float32)
    if regions := card["regions"]:
        check_array(folder / f"{split}_regions.npy", (number, len(regions), *size), np.uint8)
    values, subjects = np.load(labels, allow_pickle=False), read_subjects(folder / f"{split}_subjects.csv")
    if sex_counts([row["sex"] for row in subjects]) != card["counts"][split] or len(subjects) != number:
        raise StageError(f"{folder / f'{split}_subjects.csv'}: its counts are not those of card.json; run the stage `prepare` again")
    if not np.array_equal(values, np.array([float(row["age"]) for row in subjects], np.float32)):
        raise StageError(f"{labels}: its ages are not those of {split}_subjects.csv; run the stage `prepare` again")
    return Split(np.load(images, mmap_mode="r", allow_pickle=False), values)


def _verify(folder: Path, card: dict[str, Any]) -> None:
    for name, expected in card["files"].items():
        path = folder / name
        if not path.is_file():
            raise StageError(f"{path}: no such file; run the stage `prepare` again")
        if (found := checksum(path)) != expected:
            raise StageError(f"{path}: has sha256 {found}; card.json says {expected}. Run the stage `prepare` again")

"""Volumes labelled by a number: ``{train,validation,test}_images.npy``, float16 (N, 1, D, H, W).

Values lie in [0, 1] with a background of exactly 0; ``…_regions.npy`` are tissue shares × 255,
uint8 (N, R, D, H, W), where the card lists R ``regions``; ``…_subjects.csv`` has one row per
volume; the card counts volumes by sex.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, write_csv
from moecore.data.card import (
    SPLITS,
    Card,
    new_memmap,
    open_array,
    open_labels,
    save_array,
    write_card,
)
from moecore.data.volumes.participants import VolumeSubject, read_prepared_csv_rows
from moecore.tasks.base import Task
from moecore.tasks.regression import Regression

SEX_NAMES = {"F": "F", "M": "M", "": "unknown"}  # code in the files → name in counts
BRAIN_SHARE = 0.5  # a voxel with at least this share of tissue is inside the brain
# shares of the head, wide enough for ages 18 to 95 with atrophy
USUAL_TISSUE_SHARES = {"wm": (0.2, 0.5), "gm": (0.3, 0.7), "csf": (0.03, 0.45)}
USUAL_BRIGHTNESS = (0.2, 0.85)  # mean over the brain of a normalised T1-weighted image


class VolumeSplitToWrite(NamedTuple):
    """Subjects to write; each: volume float16 (1, D, H, W), tissues uint8 (R, D, H, W) or None."""

    subjects: Sequence[VolumeSubject]
    volumes: Iterable[tuple[np.ndarray, np.ndarray | None]]


def write_volumes(
    folder: Path, settings: Config, card: Card, parts: Mapping[str, VolumeSplitToWrite]
) -> dict[str, Any]:
    """Write arrays, tables, card.json; return the card; UserError if all train ages are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    ages = _ages(parts["train"].subjects).astype(np.float64)
    if np.ptp(ages) == 0:
        raise UserError(f"{card.name}: all ages of train are {ages[0]:g}; nothing can be learned")
    sums = [_write_split(folder, split, card, parts[split]) for split in SPLITS]
    count, total, squares = sums[0]
    mean = float(total / count)
    spread = float(ages.std())
    task = Regression(target="age", unit="years", mean=float(ages.mean()), deviation=spread)
    subjects = {split: parts[split].subjects for split in SPLITS}
    kinds = ("images.npy", "labels.npy", *(["regions.npy"] if card.regions else []), "subjects.csv")
    return write_card(
        folder,
        settings,
        card._replace(task=task),
        [f"{split}_{kind}" for split in SPLITS for kind in kinds],
        images={split: len(rows) for split, rows in subjects.items()},
        counts={split: sex_counts([row.sex for row in rows]) for split, rows in subjects.items()},
        mean=[mean],
        std=[float(np.sqrt(max(squares / count - mean**2, 0)))],
        target_range=[float(ages.min()), float(ages.max())],
        regions=list(card.regions or ()),
        dtype="float16",
        seed=settings.model_dump().get("seed", 0),
    )


def sex_counts(sexes: Sequence[str]) -> dict[str, int]:
    counts = {name: list(sexes).count(code) for code, name in SEX_NAMES.items()}
    return {name: number for name, number in counts.items() if number or name != "unknown"}


def _ages(subjects: Sequence[VolumeSubject]) -> np.ndarray:
    return np.array([row.age for row in subjects], np.float32)


def _write_split(folder: Path, split: str, card: Card, part: VolumeSplitToWrite) -> np.ndarray:
    """Write one split; return count, sum and sum of squares of the brain's voxels, fp64 (3,)."""
    shape = (len(part.subjects), 1, *card.shape)
    images = new_memmap(folder / f"{split}_images.npy", np.float16, shape)
    regions = None
    if card.regions:
        shape = (len(part.subjects), len(card.regions), *card.shape)
        regions = new_memmap(folder / f"{split}_regions.npy", np.uint8, shape)
    sums = np.zeros(3)
    subjects = []
    for row, (subject, (volume, parts)) in enumerate(zip(part.subjects, part.volumes, strict=True)):
        images[row] = volume
        if regions is not None:
            regions[row] = parts
        inside = volume[volume > 0].astype(np.float64)
        sums += [inside.size, inside.sum(), (inside**2).sum()]
        subjects.append(subject._replace(qc_flags="; ".join(flag_unusual_volume(volume, parts))))
    save_array(folder / f"{split}_labels.npy", _ages(subjects))
    # Ages in the shortest exact form.
    write_csv(folder / f"{split}_subjects.csv", [VolumeSubject._fields, *subjects])
    return sums


def open_volumes(
    folder: Path, card: Mapping[str, Any], task: Task, split: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Open a split: volumes, labels (N,) and participant numbers (N,); UserError if damaged."""
    number = card["images"][split]
    shape = (number, card["channels"], *card["size"])
    images = open_array(folder / f"{split}_images.npy", shape, np.float16)
    if regions := card["regions"]:
        shape = (number, len(regions), *card["size"])
        open_array(folder / f"{split}_regions.npy", shape, np.uint8)
    subjects = read_prepared_csv_rows(folder / f"{split}_subjects.csv")
    names = np.array([row["participant_id"] for row in subjects], dtype=str)
    _, people = np.unique(names, return_inverse=True)
    return images, open_labels(folder, task, split, number), people


def flag_unusual_volume(image: np.ndarray, regions: np.ndarray | None) -> list[str]:
    """Describe unusual brightness or tissue shares of a volume (1, D, H, W), one text each."""
    texts = []
    mean = image[image > 0].astype(np.float32).mean()
    if not USUAL_BRIGHTNESS[0] <= mean <= USUAL_BRIGHTNESS[1]:
        texts.append(f"mean intensity unusual ({mean:.2f})")
    if regions is None:
        return texts
    if unusual := list_tissues_past_limits(regions, USUAL_TISSUE_SHARES):
        texts.append(f"tissue fractions unusual ({unusual})")
    masks = [part > 255 * BRAIN_SHARE for part in regions[:2]]
    white, grey = (image[0][mask].sum(dtype=np.float64) / max(mask.sum(), 1) for mask in masks)
    if not (white > grey and masks[1].any()):
        texts.append("white matter not brighter than grey matter: not T1-weighted?")
    return texts


def list_tissues_past_limits(regions: np.ndarray, limits: Mapping[str, tuple[float, float]]) -> str:
    """List tissues whose share of all tissue is outside ``limits``, name → (low, high); or ""."""
    sums = regions.sum(axis=(1, 2, 3), dtype=np.float64)
    shares = zip(limits.items(), sums / max(sums.sum(), 1e-12), strict=True)
    return ", ".join(
        f"{name} {share:.2f}" for (name, (low, high)), share in shares if not low <= share <= high
    )

"""Write the prepared layout of volumes with a number each (data/prepared.py)."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, write_sealed
from moecore.data.prepared import SPLITS
from moecore.data.stored_arrays import new_array, save_array
from moecore.data.volumes.subjects import VolumeSubject, sex_counts, write_subject_table
from moecore.data.volumes.volume_preparation import REGIONS, unusual_volume_flags
from moecore.tasks.regression import Regression


class VolumeDatasetInfo(NamedTuple):
    """What a cohort knows before any volume is written."""

    name: str
    size: tuple[int, int, int]  # (D, H, W): voxels along right, anterior, superior
    voxel_mm: tuple[float, float, float]
    licence: str
    source: str
    settings: Config  # with a kind and a seed
    regions: tuple[str, ...] = REGIONS
    simulated: bool = False
    skipped: Sequence[Mapping[str, str]] = ()


class VolumeSplitToWrite(NamedTuple):
    """One split to write: the subjects, and in the same order their volumes float16 (1, D, H, W) in
    [0, 1] with regions uint8 (R, D, H, W).

    The writer sets the subjects' ``qc_flags``.
    """

    subjects: Sequence[VolumeSubject]
    volumes: Iterable[tuple[np.ndarray, np.ndarray | None]]


def write_volumes(
    folder: Path, facts: VolumeDatasetInfo, parts: Mapping[str, VolumeSplitToWrite]
) -> dict[str, Any]:
    """Write the splits and ``card.json`` to ``folder`` (made where missing); return the card.

    Raises UserError where all ages of train are the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ages = _ages(parts["train"].subjects).astype(np.float64)
    if np.ptp(ages) == 0:
        raise UserError(f"{facts.name}: all ages of train are {ages[0]:g}; nothing can be learned")
    sums = [_write_split(folder, split, facts, parts[split]) for split in SPLITS]
    count, total, squares = sums[0]
    mean = float(total / count)
    task = Regression(
        target="age", unit="years", mean=float(ages.mean()), deviation=float(ages.std())
    )
    settings = facts.settings.model_dump(mode="json")
    subjects = {split: parts[split].subjects for split in SPLITS}
    card = {
        "name": facts.name,
        "kind": settings["kind"],
        "task": task.model_dump(mode="json"),
        "channels": 1,
        "size": list(facts.size),
        "images": {split: len(rows) for split, rows in subjects.items()},
        "counts": {
            split: sex_counts([row.sex for row in rows]) for split, rows in subjects.items()
        },
        "mean": [mean],
        "std": [float(np.sqrt(max(squares / count - mean**2, 0)))],
        "target_range": [float(ages.min()), float(ages.max())],
        "regions": list(facts.regions),
        "voxel_mm": list(facts.voxel_mm),
        "simulated": facts.simulated,
        "skipped": [dict(row) for row in facts.skipped],
        "dtype": "float16",
        "seed": settings["seed"],
        "licence": facts.licence,
        "source": facts.source,
        "files": {name: file_checksum(folder / name) for name in _file_names(facts.regions)},
        "settings": settings,
    }
    write_sealed(folder / "card.json", card)
    return card


def _file_names(regions: Sequence[str]) -> list[str]:
    """Names of the files of a prepared folder of volumes, beside the card."""
    kinds = ("images.npy", "labels.npy", *(["regions.npy"] if regions else []), "subjects.csv")
    return [f"{split}_{kind}" for split in SPLITS for kind in kinds]


def _ages(subjects: Sequence[VolumeSubject]) -> np.ndarray:
    return np.array([row.age for row in subjects], np.float32)


def _write_split(
    folder: Path, split: str, facts: VolumeDatasetInfo, part: VolumeSplitToWrite
) -> np.ndarray:
    """Write one split; number, sum and sum of squares of its values inside the brain, fp64 (3,)."""
    shape = (len(part.subjects), 1, *facts.size)
    images = new_array(folder / f"{split}_images.npy", np.float16, shape)
    regions = None
    if facts.regions:
        shape = (len(part.subjects), len(facts.regions), *facts.size)
        regions = new_array(folder / f"{split}_regions.npy", np.uint8, shape)
    sums = np.zeros(3)
    subjects = []
    for row, (subject, (volume, shares)) in enumerate(
        zip(part.subjects, part.volumes, strict=True)
    ):
        images[row] = volume
        if regions is not None:
            regions[row] = shares
        inside = volume[volume > 0].astype(np.float64)
        sums += [inside.size, inside.sum(), (inside**2).sum()]
        subjects.append(subject._replace(qc_flags="; ".join(unusual_volume_flags(volume, shares))))
    save_array(folder / f"{split}_labels.npy", _ages(subjects))
    write_subject_table(folder / f"{split}_subjects.csv", subjects)
    return sums

"""Writes the prepared layout of volumes with a real number each (see moecore/data/prepared.py),
streaming.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, write_sealed
from moecore.data.npy import new_array, save_array
from moecore.data.prepared import SPLITS
from moecore.data.volumes.subjects import SEXES, VolumeSubject, sex_counts, write_subjects
from moecore.data.volumes.volume_checks import volume_flags
from moecore.data.volumes.volumes import REGIONS
from moecore.tasks.regression import Regression


class VolumeDatasetInfo(NamedTuple):
    """What a cohort knows before any volume is written; ``settings`` is the source's own config,
    ``skipped`` says who was left out and why.
    """

    name: str
    size: tuple[int, int, int]  # (D, H, W): voxels along right, anterior, superior
    voxel_mm: tuple[float, float, float]
    licence: str
    source: str
    settings: Config  # with a kind and a seed
    regions: tuple[str, ...] = REGIONS
    simulated: bool = False
    skipped: Sequence[Mapping[str, str]] = ()


class VolumePart(NamedTuple):
    """One split to write: the subjects, and in the same order their volumes float16 (1, D, H, W)
    with regions uint8 (R, D, H, W).

    The writer sets the subjects' ``qc_flags``.
    """

    subjects: Sequence[VolumeSubject]
    volumes: Iterable[tuple[np.ndarray, np.ndarray | None]]


def write_volumes(
    folder: Path, facts: VolumeDatasetInfo, parts: Mapping[str, VolumePart]
) -> dict[str, Any]:
    """Write the three splits and ``card.json`` to ``folder`` (made where missing) and return the
    card.

    Raises UserError on ages that are no numbers or all the same, empty splits, unknown sexes'
    codes, a participant in two splits, and volumes that do not fit: a wrong shape or dtype, values
    outside [0, 1].
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check(facts, {split: parts[split].subjects for split in SPLITS})
    sums = {split: _write_split(folder, split, facts, parts[split]) for split in SPLITS}
    card = _card(facts, {split: parts[split].subjects for split in SPLITS}, sums["train"])
    card["files"] = {
        name: file_checksum(folder / name) for name in volume_file_names(facts.regions)
    }
    write_sealed(folder / "card.json", card)
    return card


def volume_file_names(regions: Sequence[str]) -> list[str]:
    """Names of the files of a prepared folder of volumes, beside the card."""
    kinds = ("images.npy", "labels.npy", *(["regions.npy"] if regions else []), "subjects.csv")
    return [f"{split}_{kind}" for split in SPLITS for kind in kinds]


def _card(
    facts: VolumeDatasetInfo, subjects: Mapping[str, Sequence[VolumeSubject]], sums: np.ndarray
) -> dict[str, Any]:
    settings = facts.settings.model_dump(mode="json")
    ages = _ages(subjects["train"]).astype(np.float64)
    mean = sums[1] / sums[0]
    return {
        "name": facts.name,
        "kind": settings["kind"],
        "task": _task(ages).model_dump(mode="json"),
        "channels": 1,
        "size": list(facts.size),
        "images": {split: len(rows) for split, rows in subjects.items()},
        "counts": {
            split: sex_counts([row.sex for row in rows]) for split, rows in subjects.items()
        },
        "mean": [float(mean)],
        "std": [float(np.sqrt(max(sums[2] / sums[0] - mean**2, 0)))],
        "target_range": [float(ages.min()), float(ages.max())],
        "regions": list(facts.regions),
        "voxel_mm": list(facts.voxel_mm),
        "simulated": facts.simulated,
        "skipped": [dict(row) for row in facts.skipped],
        "dtype": "float16",
        "seed": settings["seed"],
        "licence": facts.licence,
        "source": facts.source,
        "files": {},
        "settings": settings,
    }


def _task(ages: np.ndarray) -> Regression:
    """To predict an age as one of the training subjects' ``ages`` (N,), years, fp64."""
    mean = float(ages.mean())
    deviation = float(ages.std())
    return Regression(target="age", unit="years", mean=mean, deviation=deviation)


def _ages(subjects: Sequence[VolumeSubject]) -> np.ndarray:
    return np.array([row.age for row in subjects], np.float32)


def _check(facts: VolumeDatasetInfo, subjects: Mapping[str, Sequence[VolumeSubject]]) -> None:
    for split, rows in subjects.items():
        if not rows:
            raise UserError(
                f"{facts.name}: no volume in {split}; every split needs one (see validation, test)"
            )
        if not np.isfinite(_ages(rows)).all():
            raise UserError(f"{facts.name}: ages of {split} are not all numbers")
        if unknown := {row.sex for row in rows} - set(SEXES):
            raise UserError(
                f"{facts.name}: found sex {sorted(unknown)} in {split}; allowed: "
                f"{', '.join(map(repr, SEXES))}"
            )
    people = {split: {row.participant_id for row in rows} for split, rows in subjects.items()}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        if both := people[one] & people[other]:
            raise UserError(
                f"{facts.name}: participant {min(both)} is in {one} and in {other}; allowed: one "
                "split for all volumes of a participant"
            )
    if np.ptp(_ages(subjects["train"])) == 0:
        raise UserError(
            f"{facts.name}: all ages of train are {subjects['train'][0].age}; there is nothing "
            "to learn"
        )


def _write_split(
    folder: Path, split: str, facts: VolumeDatasetInfo, part: VolumePart
) -> np.ndarray:
    """Write one split; number, sum and sum of squares of its values inside the brain, fp64 (3,)."""
    number = len(part.subjects)
    sums = np.zeros(3)
    images = new_array(folder / f"{split}_images.npy", np.float16, (number, 1, *facts.size))
    regions = None
    if facts.regions:
        shape = (number, len(facts.regions), *facts.size)
        regions = new_array(folder / f"{split}_regions.npy", np.uint8, shape)
    subjects: list[VolumeSubject] = []
    for row, (volume, shares) in enumerate(part.volumes):
        if row == number:
            raise UserError(f"{split}_images.npy: more volumes than the {number} ages")
        _check_fit(f"{split}_images.npy", row, volume, images)
        images[row] = volume
        if regions is not None:
            _check_fit(f"{split}_regions.npy", row, shares, regions)
            regions[row] = shares
        inside = volume[volume > 0].astype(np.float64)
        sums += [inside.size, inside.sum(), (inside**2).sum()]
        subjects.append(
            part.subjects[row]._replace(qc_flags="; ".join(volume_flags(volume, shares)))
        )
    if len(subjects) != number:
        raise UserError(f"{split}_images.npy: {len(subjects)} volumes for {number} ages")
    save_array(folder / f"{split}_labels.npy", _ages(subjects))
    write_subjects(folder / f"{split}_subjects.csv", subjects)
    return sums


def _check_fit(name: str, row: int, volume: np.ndarray | None, array: np.ndarray) -> None:
    expected = f"expected {array.dtype} {array.shape[1:]}"
    if volume is None:
        raise UserError(f"{name}: volume {row} has none; {expected}")
    if volume.shape != array.shape[1:] or volume.dtype != array.dtype:
        raise UserError(f"{name}: volume {row} is {volume.dtype} {volume.shape}; {expected}")
    # NaN fails this too
    if volume.dtype == np.float16 and not (
        0 <= volume.min() <= volume.max() <= 1 and volume.max() > 0
    ):
        raise UserError(
            f"{name}: volume {row} has values from {volume.min()} to {volume.max()}; allowed: 0 "
            "(background) to 1, not all 0"
        )

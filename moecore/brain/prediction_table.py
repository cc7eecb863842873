"""The table ``predictions.csv``: one row per volume, with what one should know before using it.

A model's error is known only for volumes like those that it was tested on: the ranges of the
training cohort are kept, and a new volume outside of them is flagged.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError, atomic_text_file
from moecore.core.plain_values import spreadsheet_cell
from moecore.data.prepared import Prepared
from moecore.measure.calibrators.base import FittedCalibrator
from moecore.statistics.intervals import Estimate


class QuantityRange(Config):
    """The smallest and the largest value over the training volumes."""

    low: float
    high: float


class PreparationFacts(Config):
    """The facts of the data card that new volumes need to be prepared and compared."""

    size: tuple[int, ...]
    voxel_mm: tuple[float, ...]
    target_range: tuple[float, float]


class ConformalInterval(Config):
    """The conformal interval of a single prediction."""

    level: float
    radius: float | None = Field(description="half its width, years; null: too few participants")
    n: int = Field(description="validation participants behind it")
    coverage: Estimate | None = Field(description="share of the test volumes inside")
    method: str


class TrainingCohortRanges(Config):
    """Content of ``reference.json``, beside a calibrator."""

    ranges: dict[str, QuantityRange] = Field(
        description="of each quantity over the training volumes"
    )
    sites: tuple[str, ...]
    data: PreparationFacts
    interval: ConformalInterval
    predictor_sha256: str


def describe_volume(volume: np.ndarray, voxel_mm: Sequence[float]) -> dict[str, float]:
    """The quantities of a prepared volume (1, D, H, W) in [0, 1], background exactly 0."""
    inside = volume[volume > 0].astype(np.float64)
    return {
        "intensity_mean": float(inside.mean()),
        "intensity_std": float(inside.std()),
        "brain_ml": inside.size * float(np.prod(voxel_mm)) / 1000,
    }


def collect_training_ranges(
    data: Prepared, interval: ConformalInterval, sha256: str
) -> TrainingCohortRanges:
    """The ranges over the training volumes, and the card's facts; sha256: of the weights."""
    facts = PreparationFacts(**{name: data.card[name] for name in PreparationFacts.model_fields})
    quantities = [describe_volume(volume, facts.voxel_mm) for volume in data.train.images]
    ranges = {}
    for name in quantities[0]:
        values = [one[name] for one in quantities]
        ranges[name] = QuantityRange(low=min(values), high=max(values))
    sites = sorted({row["site"] for row in data.subjects("train")} - {""})
    return TrainingCohortRanges(
        ranges=ranges, sites=sites, data=facts, interval=interval, predictor_sha256=sha256
    )


def out_of_range_flags(volume: np.ndarray, reference: TrainingCohortRanges) -> list[str]:
    """One flag for each quantity of a prepared volume that lies outside that of training."""
    quantities = describe_volume(volume, reference.data.voxel_mm)
    return [
        f"{name} {quantities[name]:.4g} outside training {limits.low:.4g} to {limits.high:.4g}"
        for name, limits in reference.ranges.items()
        if not limits.low <= quantities[name] <= limits.high
    ]


def age_range_flags(
    predicted: float, age: float | None, reference: TrainingCohortRanges
) -> list[str]:
    """Flags where the prediction or the known age lies outside the ages of training."""
    low, high = reference.data.target_range
    values = {"predicted age": predicted, "age": age}
    return [
        f"{name} {value:.1f} outside training {low:.1f} to {high:.1f}"
        for name, value in values.items()
        if value is not None and not low <= value <= high
    ]


def unknown_site_flags(site: str, reference: TrainingCohortRanges) -> list[str]:
    """A flag where a site is named that training did not have."""
    return [f"site {site} not in training"] if site and site not in reference.sites else []


NO_GROUP = "none"  # where nothing is corrected


class PredictionRow(NamedTuple):
    """One row of the table, in years; None is empty in the file."""

    participant_id: str
    session_id: str
    split: str
    sex: str
    site: str
    age: float | None
    predicted_age: float
    predicted_age_pooled: float | None
    predicted_age_sex_specific: float | None
    brain_pad_raw: float | None  # predicted minus known age
    brain_pad_pooled: float | None
    interval_low: float | None
    interval_high: float | None
    calibration_group: str  # whose line corrected it
    qc_flags: str


COLUMNS = PredictionRow._fields


class CorrectedAges(NamedTuple):
    """Predictions of N volumes in years, each (N,): as they come, and corrected.

    ``groups`` says whose line corrected each per sex. Without a calibrator: None. ``uses_age``: the
    known age stands in what is corrected, which is NaN where none is known.
    """

    raw: np.ndarray
    pooled: np.ndarray | None
    sex_specific: np.ndarray | None
    groups: list[str] | None
    uses_age: bool = False

    @property
    def best(self) -> np.ndarray:
        """The predictions that intervals are around: the pooled correction, else the raw ones.

        The raw ones, too, where the correction takes the age: that is no prediction.
        """
        return self.raw if self.pooled is None or self.uses_age else self.pooled

    @property
    def variants(self) -> dict[str, np.ndarray]:
        """The predictions that there are, by name."""
        named = {"raw": self.raw, "pooled": self.pooled, "sex_specific": self.sex_specific}
        return {name: values for name, values in named.items() if values is not None}


def correct_ages(
    raw: np.ndarray,
    sexes: Sequence[str],
    fitted: FittedCalibrator | None,
    ages: np.ndarray | None = None,
) -> CorrectedAges:
    """Raw predictions (N,) with both corrections.

    ages: (N,), NaN where unknown; looked at only by a calibrator that ``uses_age``.
    """
    raw = np.asarray(raw, np.float64)
    if fitted is None:
        return CorrectedAges(raw, None, None, None)
    if fitted.uses_age:
        return _correct_by_age(raw, sexes, fitted, ages)
    return CorrectedAges(raw, fitted.apply(raw), fitted.apply(raw, sexes), fitted.used(sexes))


def _correct_by_age(
    raw: np.ndarray, sexes: Sequence[str], fitted: Any, ages: np.ndarray | None
) -> CorrectedAges:
    ages = np.full(len(raw), np.nan) if ages is None else np.asarray(ages, np.float64)
    known = np.isfinite(ages)
    known_sexes = [sex for sex, there in zip(sexes, known, strict=True) if there]
    pooled, own = np.full((2, len(raw)), np.nan)
    pooled[known] = fitted.apply(raw[known], None, ages[known])
    own[known] = fitted.apply(raw[known], known_sexes, ages[known])
    groups = [
        group if there else NO_GROUP for group, there in zip(fitted.used(sexes), known, strict=True)
    ]
    return CorrectedAges(raw, pooled, own, groups, uses_age=True)


def prediction_rows(
    subjects: Sequence[Mapping[str, str]],
    split: str,
    corrected: CorrectedAges,
    radius: float | None,
    flags: Sequence[Sequence[str]],
) -> list[PredictionRow]:
    """One row a subject, in order; an unknown age leaves the brain-PADs empty.

    subjects: with participant_id, session_id, sex, site, age (text; "" is unknown) and qc_flags;
    radius: half the interval's width in years, None: no interval; flags: (N,) more flags of each
    volume, added to the subject's own.
    """
    rows = []
    nothing = [None] * len(subjects)
    for subject, raw, pooled, own, group, centre, more in zip(
        subjects,
        corrected.raw.tolist(),
        nothing if corrected.pooled is None else corrected.pooled.tolist(),
        nothing if corrected.sex_specific is None else corrected.sex_specific.tolist(),
        corrected.groups or [NO_GROUP] * len(subjects),
        corrected.best.tolist(),
        flags,
        strict=True,
    ):
        age = float(subject["age"]) if subject["age"] else None
        if corrected.uses_age and age is None:
            pooled = own = None
            more = (*more, "not corrected: the correction takes the age, which is unknown")
        row = PredictionRow(
            participant_id=subject["participant_id"],
            session_id=subject["session_id"],
            split=split,
            sex=subject["sex"],
            site=subject["site"],
            age=age,
            predicted_age=raw,
            predicted_age_pooled=pooled,
            predicted_age_sex_specific=own,
            brain_pad_raw=_subtract(raw, age),
            brain_pad_pooled=_subtract(pooled, age),
            interval_low=_subtract(centre, radius),
            interval_high=None if radius is None else centre + radius,
            calibration_group=group,
            qc_flags="; ".join(flag for flag in (subject.get("qc_flags", ""), *more) if flag),
        )
        rows.append(row)
    return rows


def write_predictions(
    path: str | Path,
    rows: Iterable[PredictionRow],
    left_out: Sequence[tuple[Mapping[str, str], str]] | None = None,
) -> None:
    """Write the rows as CSV under the names of ``COLUMNS``; numbers have four decimals.

    left_out: subjects without a prediction, and why: they come last, with the reason in a column
    ``error``; None: there is no such column.
    """
    lines = [[_cell_text(value) for value in row] for row in rows]
    columns = [*COLUMNS]
    if left_out is not None:
        columns.append("error")
        lines = [[*line, ""] for line in lines]
        lines += [[*(subject.get(name, "") for name in COLUMNS), why] for subject, why in left_out]
        lines = [[spreadsheet_cell(cell) for cell in line] for line in lines]
    with atomic_text_file(path) as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)


def read_predictions(path: str | Path) -> list[dict[str, str]]:
    """The rows by column, all values text; UserError where the file is missing."""
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            return list(csv.DictReader(handle))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None


def _subtract(value: float | None, other: float | None) -> float | None:
    if value is None or other is None:
        return None
    return value - other


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)

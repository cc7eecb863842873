"""The table ``predictions.csv``: one row a volume, with what one should know before using it."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError, atomic_text_file
from moecore.core.plain_values import spreadsheet_cell
from moecore.measure.calibrators.base import FittedCalibrator

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

"""The table ``predictions.csv``: one row a volume, with what one should know before using it."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError, whole_text
from moecore.core.plain import spreadsheet_cell
from moecore.measure.calibrators.linear import POOLED, FittedLinear

FLAG_SEPARATOR = "; "  # between two flags of one volume
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

    ``groups`` says whose line corrected each per sex. Where there is no calibrator, the corrected
    ones and the groups are None.
    """

    raw: np.ndarray
    pooled: np.ndarray | None
    sex_specific: np.ndarray | None
    groups: list[str] | None

    @property
    def best(self) -> np.ndarray:
        """The predictions that intervals are around: the pooled correction, or the raw one where
        there is none.
        """
        return self.raw if self.pooled is None else self.pooled

    @property
    def variants(self) -> dict[str, np.ndarray]:
        """The predictions that there are, by name."""
        named = {"raw": self.raw, "pooled": self.pooled, "sex_specific": self.sex_specific}
        return {name: values for name, values in named.items() if values is not None}


def correct_ages(
    raw: np.ndarray, sexes: Sequence[str], fitted: FittedLinear | None
) -> CorrectedAges:
    """Raw predictions (N,) with both corrections. No age is looked at."""
    raw = np.asarray(raw, np.float64)
    if fitted is None:
        return CorrectedAges(raw, None, None, None)
    return CorrectedAges(raw, fitted.apply(raw), fitted.apply(raw, sexes), fitted.used(sexes))


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
    Raises UserError where the numbers of subjects, predictions and flags differ.
    """
    if not len(subjects) == len(corrected.raw) == len(flags):
        raise UserError(
            f"predictions: {len(subjects)} subjects, {len(corrected.raw)} predictions and "
            f"{len(flags)} lists of flags; one each is needed"
        )
    return [
        _prediction_row(subject, split, place, corrected, radius, flags[place])
        for place, subject in enumerate(subjects)
    ]


def _prediction_row(
    subject: Mapping[str, str],
    split: str,
    place: int,
    corrected: CorrectedAges,
    radius: float | None,
    flags: Sequence[str],
) -> PredictionRow:
    age = float(subject["age"]) if subject["age"] else None
    raw = float(corrected.raw[place])
    pooled = None if corrected.pooled is None else float(corrected.pooled[place])
    own = None if corrected.sex_specific is None else float(corrected.sex_specific[place])
    centre = float(corrected.best[place])
    known = [flag for flag in subject.get("qc_flags", "").split(FLAG_SEPARATOR) if flag]
    return PredictionRow(
        participant_id=subject["participant_id"],
        session_id=subject["session_id"],
        split=split,
        sex=subject["sex"],
        site=subject["site"],
        age=age,
        predicted_age=raw,
        predicted_age_pooled=pooled,
        predicted_age_sex_specific=own,
        brain_pad_raw=_subtract_age(raw, age),
        brain_pad_pooled=_subtract_age(pooled, age),
        interval_low=None if radius is None else centre - radius,
        interval_high=None if radius is None else centre + radius,
        calibration_group=NO_GROUP if corrected.groups is None else corrected.groups[place],
        qc_flags=FLAG_SEPARATOR.join([*known, *flags]),
    )


def write_predictions(
    path: str | Path,
    rows: Iterable[PredictionRow],
    left_out: Sequence[tuple[Mapping[str, str], str]] | None = None,
) -> None:
    """Write the rows as CSV under the names of ``COLUMNS``; numbers have four decimals.

    left_out: subjects without a prediction, and why: they come last, with the reason in a column
    ``error``; None: there is no such column.
    """
    errors = [] if left_out is None else ["error"]
    with whole_text(path) as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow([*COLUMNS, *errors])
        for row in rows:
            cells = (
                map(_cell_text, row)
                if left_out is None
                else map(spreadsheet_cell, map(_cell_text, row))
            )
            writer.writerow([*cells, *("" for _ in errors)])
        for subject, why in left_out or ():
            cells = [*(subject.get(name, "") for name in COLUMNS), why]
            writer.writerow(map(spreadsheet_cell, cells))


def read_predictions(path: str | Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """The rows by column, all values text.

    Raises UserError where the file is missing or lacks one of ``columns``.
    """
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            rows = csv.DictReader(handle)
            if lacking := [name for name in columns if name not in (rows.fieldnames or ())]:
                raise UserError(
                    f"{path}: lacks the columns {', '.join(lacking)}; run the stage that writes it "
                    "again"
                )
            return list(rows)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None


def group_counts(groups: Sequence[str] | None) -> dict[str, int]:
    """Return how many volumes each line corrected, the pooled one last; {} without a calibrator."""
    every = list(groups or ())
    names = sorted(set(every), key=lambda name: (name == POOLED, name))
    return {name: every.count(name) for name in names}


def _subtract_age(predicted: float | None, age: float | None) -> float | None:
    if predicted is None or age is None:
        return None
    return predicted - age


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)

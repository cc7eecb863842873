"""The table ``predictions.csv``: one row a volume, with what was predicted, corrected, and what one should know before using it."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.calibration.linear import POOLED, FittedLinear
from moecore.files import StageError, whole_file

COLUMNS = (
    "participant_id", "session_id", "split", "sex", "site", "age", "predicted_age", "predicted_age_pooled", "predicted_age_sex_specific",
    "brain_pad_raw", "brain_pad_pooled", "interval_low", "interval_high", "calibration_group", "qc_flags",
)  # fmt: skip
FLAGS = "; "  # between two flags of one volume


class Corrected(NamedTuple):
    """Predictions of N volumes in years, each (N,): as they come, and corrected; ``groups`` says whose line corrected each per sex.

    Where there is no calibrator, the corrected ones and the groups are None.
    """

    raw: np.ndarray
    pooled: np.ndarray | None
    sex_specific: np.ndarray | None
    groups: list[str] | None

    @property
    def best(self) -> np.ndarray:
        """What intervals are around: the pooled correction, or the raw prediction where there is none."""
        return self.raw if self.pooled is None else self.pooled


def corrected(raw: np.ndarray, sexes: Sequence[str], fitted: FittedLinear | None) -> Corrected:
    """Raw predictions (N,) with both corrections. No age is looked at."""
    raw = np.asarray(raw, np.float64)
    if fitted is None:
        return Corrected(raw, None, None, None)
    return Corrected(raw, fitted.apply(raw), fitted.apply(raw, sexes), fitted.used(sexes))


def prediction_rows(
    subjects: Sequence[Mapping[str, str]], split: str, found: Corrected, radius: float | None, flags: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """One row a subject, in order; an unknown age leaves the brain-PADs empty.

    subjects: with participant_id, session_id, sex, site, age (text; "" is unknown) and qc_flags; radius: half the interval's width in
    years, None: no interval; flags: (N,) more flags of each volume, added to the subject's own.
    Raises StageError where the numbers of subjects, predictions and flags differ.
    """
    if not len(subjects) == len(found.raw) == len(flags):
        raise StageError(f"predictions: {len(subjects)} subjects, {len(found.raw)} predictions and {len(flags)} lists of flags; one each is needed")
    return [_row(subject, split, place, found, radius, flags[place]) for place, subject in enumerate(subjects)]


def _row(subject: Mapping[str, str], split: str, place: int, found: Corrected, radius: float | None, flags: Sequence[str]) -> dict[str, Any]:
    age = float(subject["age"]) if subject["age"] else None
    raw, pooled, own = (None if values is None else float(values[place]) for values in found[:3])
    centre = float(found.best[place])
    every = [flag for flag in subject.get("qc_flags", "").split(FLAGS) if flag] + list(flags)
    return {
        **{name: subject[name] for name in ("participant_id", "session_id", "sex", "site")}, "split": split, "age": age,
        "predicted_age": raw, "predicted_age_pooled": pooled, "predicted_age_sex_specific": own,
        "brain_pad_raw": _minus(raw, age), "brain_pad_pooled": _minus(pooled, age),
        "interval_low": None if radius is None else centre - radius, "interval_high": None if radius is None else centre + radius,
        "calibration_group": "none" if found.groups is None else found.groups[place], "qc_flags": FLAGS.join(every),
    }  # fmt: skip


def write_predictions(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows as CSV with the head line ``COLUMNS``; numbers with four digits after the point, unknown ones empty."""
    with whole_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(row[name]) for name in COLUMNS} for row in rows)


def read_predictions(path: str | Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """The rows, all values text. Raises StageError where the file is missing or lacks one of ``columns``."""
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            rows = csv.DictReader(handle)
            if lacking := [name for name in columns if name not in (rows.fieldnames or ())]:
                raise StageError(f"{path}: lacks the columns {', '.join(lacking)}; run the stage that writes it again")
            return list(rows)
    except FileNotFoundError:
        raise StageError(f"{path}: no such file; the stage that writes it has not run") from None


def group_counts(groups: Sequence[str] | None) -> dict[str, int]:
    """How many volumes each line corrected, the pooled one last; {} without a calibrator."""
    names = sorted(set(groups or ()), key=lambda name: (name == POOLED, name))
    return {name: list(groups or ()).count(name) for name in names}


def _minus(predicted: float | None, age: float | None) -> float | None:
    return None if predicted is None or age is None else predicted - age


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

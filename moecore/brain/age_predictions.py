"""One model's predictions of ages, and the line that corrects them.

N volumes of a split, in years.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.brain.prediction_table import CorrectedAges, correct_ages, read_predictions
from moecore.core.files import UserError, file_checksum
from moecore.data.prepared import SPLITS, Prepared
from moecore.measure.calibration import OnRefusal
from moecore.measure.calibrators.base import Calibrator, FitOn, FittedCalibrator


class Ages(NamedTuple):
    """One model's predictions of all splits, and what they are compared with."""

    data: Prepared
    predicted: Mapping[str, np.ndarray]  # by split, (N,)
    subjects: Mapping[str, Sequence[Mapping[str, str]]]  # by split, in the same order
    sha256: str  # of the model.safetensors

    @classmethod
    def of(cls, data: Prepared, predicted: Mapping[str, np.ndarray], weights: Path) -> "Ages":
        """Return them with subjects and hash from disk; UserError for NaN or infinite ones."""
        for split, values in predicted.items():
            if bad := int((~np.isfinite(values)).sum()):
                raise UserError(
                    f"calibrate: {bad} of {len(values)} predictions of the split {split} are NaN "
                    "or infinite; train the model again"
                )
        subjects = {split: data.subjects(split) for split in SPLITS}
        return cls(data, predicted, subjects, file_checksum(weights))

    def known(self, split: str) -> np.ndarray:
        """The ages (N,)."""
        return np.asarray(getattr(self.data, split).labels, np.float64)

    def column(self, split: str, name: str) -> list[str]:
        """One fact of every volume's subject, "" where it is unknown."""
        return [row[name] for row in self.subjects[split]]

    def correct_split(self, split: str, fitted: FittedCalibrator | None) -> CorrectedAges:
        """The predictions of a split as they come and corrected."""
        sexes = self.column(split, "sex")
        return correct_ages(self.predicted[split], sexes, fitted, self.known(split))


class CalibratorFit(NamedTuple):
    """The calibrator, or why there is none, and how many pairs it was fitted to."""

    fitted: FittedCalibrator | None
    refused: str | None
    n: int
    split: FitOn
    kind: str = "linear"

    @property
    def uses_age(self) -> bool:
        """Return whether what it corrects is the gap of a known age, and no prediction."""
        return self.fitted is not None and self.fitted.uses_age


def fit_age_line(
    ages: Ages, calibrator: Calibrator, out_of_fold: Path, on_refusal: OnRefusal = "stop"
) -> CalibratorFit:
    """The calibrator fitted to the pairs that it names.

    out_of_fold: the predictions.csv of the stage ``out_of_fold``, read only where ``calibrator``
    asks for it. Raises UserError where these are of other volumes, and where the fit is refused,
    unless ``on_refusal`` is "report": then the reason stands in the result.
    """
    if calibrator.split == "out_of_fold":
        rows = _read_training_predictions(ages, out_of_fold)
        predicted = np.array([float(row["predicted_age"]) for row in rows])
        known = np.array([float(row["age"]) for row in rows])
        sexes = [row["sex"] for row in rows]
    else:
        predicted = ages.predicted[calibrator.split]
        known = ages.known(calibrator.split)
        sexes = ages.column(calibrator.split, "sex")
    try:
        fitted = calibrator.fit(predicted, known, sexes)
    except UserError as error:
        if on_refusal == "stop":
            raise
        warnings.warn(f"{error}. Nothing is corrected (calibrate.on_refusal: report)", stacklevel=2)
        return CalibratorFit(None, str(error), len(known), calibrator.split, calibrator.kind)
    fitted = fitted.model_copy(update={"predictor_sha256": ages.sha256})
    return CalibratorFit(fitted, None, len(known), calibrator.split, calibrator.kind)


def _read_training_predictions(ages: Ages, path: Path) -> list[dict[str, str]]:
    rows = read_predictions(path)
    predicted, trained = (
        {(row["participant_id"], row["session_id"]) for row in some}
        for some in (rows, ages.subjects["train"])
    )
    if predicted != trained:
        raise UserError(
            f"{path}: its volumes are not those of the training split; run the stage `out_of_fold` "
            "again"
        )
    return rows

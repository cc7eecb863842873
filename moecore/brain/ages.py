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
from moecore.measure.calibrators.linear import FittedLinear, Linear

READ_COLUMNS = ("participant_id", "session_id", "sex", "age", "predicted_age")


class Ages(NamedTuple):
    """One model's predictions of all splits, and what they are compared with."""

    data: Prepared
    predicted: Mapping[str, np.ndarray]  # by split, (N,)
    subjects: Mapping[str, Sequence[Mapping[str, str]]]  # by split, in the same order
    sha256: str  # of the model.safetensors

    @classmethod
    def of(cls, data: Prepared, predicted: Mapping[str, np.ndarray], weights: Path) -> "Ages":
        """Return them with subjects and the hash read from disk.

        Raises UserError for predictions that are NaN or infinite.
        """
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

    def correct_split(self, split: str, fitted: FittedLinear | None) -> CorrectedAges:
        """The predictions of a split as they come and corrected."""
        return correct_ages(self.predicted[split], self.column(split, "sex"), fitted)


class LineFit(NamedTuple):
    """The calibrator, or why there is none, and how many pairs it was fitted to."""

    fitted: FittedLinear | None
    refused: str | None
    n: int


class FitPairs(NamedTuple):
    """Pairs that a line is fitted to: n predictions, their ages and sexes."""

    predictions: np.ndarray  # (n,)
    ages: np.ndarray  # (n,)
    sexes: list[str]


def fit_age_line(
    ages: Ages, calibrator: Linear, out_of_fold: Path, on_refusal: OnRefusal = "stop"
) -> LineFit:
    """The calibrator fitted to the pairs that it names.

    out_of_fold: the predictions.csv of the stage ``out_of_fold``, read only where ``calibrator``
    asks for it. Raises UserError where the fit is refused, unless ``on_refusal`` is "report": then
    the reason stands in the result.
    """
    pairs = calibration_pairs(ages, calibrator, out_of_fold)
    try:
        return LineFit(calibrator.fit(*pairs, ages.sha256), None, len(pairs.ages))
    except UserError as error:
        if on_refusal == "stop":
            raise
        warnings.warn(f"{error}. Nothing is corrected (calibrate.on_refusal: report)", stacklevel=2)
        return LineFit(None, str(error), len(pairs.ages))


def calibration_pairs(ages: Ages, calibrator: Linear, out_of_fold: Path) -> FitPairs:
    """The pairs that a calibrator is fitted to.

    Raises UserError where the out-of-fold predictions are of other volumes.
    """
    split = calibrator.fit_on
    if split != "out_of_fold":
        return FitPairs(ages.predicted[split], ages.known(split), ages.column(split, "sex"))
    rows = read_predictions(out_of_fold, READ_COLUMNS)
    training_volumes = {
        (row["participant_id"], row["session_id"]) for row in ages.subjects["train"]
    }
    if {(row["participant_id"], row["session_id"]) for row in rows} != training_volumes:
        raise UserError(
            f"{out_of_fold}: its volumes are not those of the training split; run the stage "
            "`out_of_fold` again"
        )
    return FitPairs(
        predictions=np.array([float(row["predicted_age"]) for row in rows]),
        ages=np.array([float(row["age"]) for row in rows]),
        sexes=[row["sex"] for row in rows],
    )

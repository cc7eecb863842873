"""Ages of new volumes by a trained and calibrated model, with flags for volumes unlike training.

N volumes, in years.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.brain.prediction_table import (
    PredictionRow,
    TrainingCohortRanges,
    age_range_flags,
    correct_ages,
    out_of_range_flags,
    prediction_rows,
    unknown_site_flags,
    write_predictions,
)
from moecore.core.config import read_json_settings
from moecore.core.files import UserError, file_checksum
from moecore.core.routing_records import RoutingRecord
from moecore.measure.calibrators.base import FittedCalibrator, read_fitted
from moecore.nn.predict import predict_in_batches
from moecore.predict.ages import NewVolumeFile, find_volumes, prepare_volumes
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime


class Calibration(NamedTuple):
    """What the stage ``calibrate`` left beside a model."""

    reference: TrainingCohortRanges
    fitted: FittedCalibrator | None  # None where its fit was refused


class NewAges(NamedTuple):
    """What is said of the volumes of a folder."""

    rows: list[PredictionRow]  # of those that could be used
    volumes: np.ndarray  # of these, (N, 1, D, H, W)
    routing: tuple[RoutingRecord, ...]  # of these, one per MoE layer
    left_out: list[tuple[NewVolumeFile, str]]  # and why


def predict_ages(
    model_folder: Path, folder: Path, out: Path, calibrator: Path | None = None, batch: int = 8
) -> NewAges:
    """Write predictions.csv of every volume below ``folder``, and return what it says.

    A volume that cannot be used keeps a line, with the reason in the column ``error``. Raises
    UserError for another model's calibrator, or if no volume can be used.
    """
    calibration = load_age_calibration(calibrator or calibrator_folder(model_folder), model_folder)
    new_volumes = find_volumes(folder)
    volumes, reasons = prepare_volumes(new_volumes, calibration.reference)
    used = [one for one, why in zip(new_volumes, reasons, strict=True) if not why]
    left_out = [(one, why) for one, why in zip(new_volumes, reasons, strict=True) if why]
    if not used:
        count = f"none of {len(new_volumes)} volumes can be used"
        raise UserError("\n".join([*(why for _, why in left_out), count]))
    usable = np.stack(volumes)
    model = load_model(model_folder).to(tune_runtime().device)
    said, routing = predict_in_batches(model, usable, batch)
    rows = new_age_rows(used, usable, said[:, 0].double().numpy(), calibration)
    write_predictions(out, rows, [(one.subject, why) for one, why in left_out])
    return NewAges(rows, usable, routing, left_out)


def new_age_rows(
    new_volumes: Sequence[NewVolumeFile],
    volumes: np.ndarray,
    raw: np.ndarray,
    calibration: Calibration,
) -> list[PredictionRow]:
    """Return the rows of predictions.csv, with flags for all in which a volume is unlike training.

    volumes: (N, 1, D, H, W); raw: (N,).
    """
    reference = calibration.reference
    subjects = [one.subject for one in new_volumes]
    ages = [float(subject["age"]) if subject["age"] else None for subject in subjects]
    sexes = [subject["sex"] for subject in subjects]
    known = np.array([np.nan if age is None else age for age in ages])
    said = correct_ages(raw, sexes, calibration.fitted, known)
    flags = [
        [
            *out_of_range_flags(volume, reference),
            *age_range_flags(float(best), age, reference),
            *unknown_site_flags(subject["site"], reference),
        ]
        for subject, volume, best, age in zip(subjects, volumes, said.best, ages, strict=True)
    ]
    return prediction_rows(subjects, "new", said, reference.interval.radius, flags)


def calibrator_folder(model_folder: Path) -> Path:
    """artifacts/calibrate/<phase>/<method>/<seed> of artifacts/<phase>/<method>/<seed>."""
    above = model_folder.absolute().parent
    phase = above.parent
    return phase.parent / "calibrate" / phase.name / above.name / model_folder.absolute().name


def load_age_calibration(folder: Path, model_folder: Path) -> Calibration:
    """Return what lies in ``folder``. Raises UserError where it is damaged, or of another model."""
    place = folder / "reference.json"
    if not place.is_file():
        problem = f"{folder}: holds no reference.json, which says how volumes are prepared"
        ways = "the stage `calibrate` writes it, --calibrator names another folder"
        raise UserError(f"{problem} and what is usual; {ways}")
    reference = read_json_settings(place, TrainingCohortRanges, "a reference")
    digest = file_checksum(model_folder / "model.safetensors")
    if digest != reference.predictor_sha256:
        wrong = f"made for the model {reference.predictor_sha256[:12]}…, this one is {digest[:12]}…"
        raise UserError(f"{folder}: {wrong}; allowed: the calibrator of this very model")
    path = folder / "calibrator.json"
    if not path.exists():
        return Calibration(reference, None)
    return Calibration(reference, read_fitted(path, "numbers"))

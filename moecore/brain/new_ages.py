"""Ages of new volumes by a trained and calibrated model, with flags for volumes unlike training.

N volumes, in years.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from moecore.brain.new_volumes import NewVolume, find_volumes, prepared
from moecore.brain.prediction_table import (
    PredictionRow,
    corrected,
    prediction_rows,
    write_predictions,
)
from moecore.brain.reference import Reference, beyond_ages, unknown_site, unlike
from moecore.core.files import UserError, read_json
from moecore.data.files.checksum import checksum
from moecore.measure.calibrators.linear import FittedLinear
from moecore.nn.predict import predictions
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune

OnError = Literal["stop", "skip"]


class Calibration(NamedTuple):
    """What the stage ``calibrate`` left beside a model."""

    reference: Reference
    fitted: FittedLinear | None  # None where its fit was refused


def predict_ages(
    model_folder: Path,
    folder: Path,
    out: Path,
    calibrator: Path | None = None,
    on_error: OnError = "stop",
    batch: int = 8,
) -> list[PredictionRow]:
    """Write predictions.csv of every volume below ``folder`` and return its rows.

    on_error: "stop" where any volume cannot be used, or "skip" these, naming each on stderr.
    Raises UserError that lists all problems; for a calibrator of another model; and where nothing
    is left.
    """
    calibration = calibration_of(calibrator or calibrator_of(model_folder), model_folder)
    found = find_volumes(folder)
    volumes, problems = prepared(found, calibration.reference)
    if problems and (on_error == "stop" or len(problems) == len(found)):
        count = f"{len(problems)} of {len(found)} volumes cannot be used"
        raise UserError("\n".join([*problems, f"{count}; --on-error skip leaves them out"]))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    kept = [(one, volume) for one, volume in zip(found, volumes, strict=True) if volume is not None]
    usable = np.stack([volume for _, volume in kept])
    model = load_model(model_folder).to(tune().device)
    said = predictions(model, usable, batch, routing=False)[0][:, 0].double().numpy()
    rows = rows_of([one for one, _ in kept], usable, said, calibration)
    write_predictions(out, rows)
    return rows


def rows_of(
    found: Sequence[NewVolume], volumes: np.ndarray, raw: np.ndarray, calibration: Calibration
) -> list[PredictionRow]:
    """The rows of predictions.csv, with a flag for all in which a volume is unlike the training.

    volumes: (N, 1, D, H, W); raw: (N,).
    """
    reference = calibration.reference
    subjects = [one.subject for one in found]
    said = corrected(raw, [subject["sex"] for subject in subjects], calibration.fitted)
    flags = []
    for subject, volume, best in zip(subjects, volumes, said.best, strict=True):
        age = float(subject["age"]) if subject["age"] else None
        flags.append(
            [
                *unlike(volume, reference),
                *beyond_ages(float(best), age, reference),
                *unknown_site(subject["site"], reference),
            ]
        )
    return prediction_rows(subjects, "new", said, reference.interval.radius, flags)


def calibrator_of(model_folder: Path) -> Path:
    """artifacts/calibrate/<phase>/<method>/<seed> of artifacts/<phase>/<method>/<seed>."""
    phase, method, seed = model_folder.resolve().parts[-3:]
    return model_folder.resolve().parents[2] / "calibrate" / phase / method / seed


def calibration_of(folder: Path, model_folder: Path) -> Calibration:
    """What lies in ``folder``. Raises UserError where it is damaged, or of another model."""
    reference = _reference(folder / "reference.json")
    found = checksum(model_folder / "model.safetensors")
    if found != reference.predictor_sha256:
        raise UserError(
            f"{folder}: made for the model {reference.predictor_sha256[:12]}…, this one is "
            f"{found[:12]}…; allowed: the calibrator of this very model"
        )
    path = folder / "calibrator.json"
    if not path.exists():
        return Calibration(reference, None)
    try:
        return Calibration(reference, FittedLinear.from_json(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise UserError(f"{path}: not a fitted linear calibrator: {error}") from error


def _reference(path: Path) -> Reference:
    try:
        return Reference.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: written by other code ({place}: {first['msg']}); run `dvc repro calibrate`"
        ) from error

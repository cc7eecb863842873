"""Predict the ages of new volumes with a trained and calibrated model. No stage of a pipeline: a tool for its user.

    python -m stages.predict artifacts/pretrain/ermoe_ba/0 FOLDER --out predictions.csv

FOLDER is in BIDS form, or holds .nii.gz files; participants.tsv in it may give sex (for the correction per sex) and age (for brain-PAD).
The calibrator is found beside the model (artifacts/calibrate/<phase>/<method>/<seed>) or named by --calibrator. Volumes unlike those
of training are flagged in the column qc_flags and on stderr. Read MODEL_CARD.md first: it says what the numbers may not be used for.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from moecore.artifacts import load_model
from moecore.calibration.linear import FittedLinear
from moecore.data.checksum import checksum
from moecore.evaluation.predict import predictions
from moecore.files import StageError, read_json
from moecore.new_volumes import Found, find_volumes, prepared
from moecore.predictions import corrected, prediction_rows, write_predictions
from moecore.reference import beyond_ages, unlike
from moecore.training.runtime import tune


def predict(model_folder: Path, folder: Path, out: Path, calibrator: Path | None = None, on_error: str = "stop", batch: int = 8) -> list[dict[str, Any]]:
    """Write predictions.csv of every volume below ``folder`` and return its rows.

    on_error: "stop" where any volume cannot be used, or "skip" these, naming each on stderr.
    Raises StageError that lists all problems; for a calibrator of another model; and where nothing is left.
    """
    calibrator = calibrator or calibrator_of(model_folder)
    reference, fitted = calibration(calibrator, model_folder)
    found = find_volumes(folder)
    volumes, problems = prepared(found, reference)
    if problems and (on_error == "stop" or len(problems) == len(found)):
        raise StageError("\n".join([*problems, f"{len(problems)} of {len(found)} volumes cannot be used; --on-error skip leaves them out"]))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    kept = [(one, volume) for one, volume in zip(found, volumes, strict=True) if volume is not None]
    model = load_model(model_folder).to(tune().device)
    raw = predictions(model, np.stack([volume for _, volume in kept]), batch, routing=False)[0][:, 0].double().numpy()
    rows = rows_of([one for one, _ in kept], [volume for _, volume in kept], raw, fitted, reference)
    write_predictions(out, rows)
    return rows


def rows_of(found: Sequence[Found], volumes: Sequence[np.ndarray], raw: np.ndarray, fitted: FittedLinear | None, reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of predictions.csv, with a flag for everything in which a volume is unlike the training data."""
    subjects = [one.subject for one in found]
    said = corrected(raw, [subject["sex"] for subject in subjects], fitted)
    flags = []
    for subject, volume, best in zip(subjects, volumes, said.best, strict=True):
        age = float(subject["age"]) if subject["age"] else None
        flags.append([*unlike(volume, reference), *beyond_ages(float(best), age, reference), *unknown_site(subject["site"], reference)])
    return prediction_rows(subjects, "new", said, reference["interval"]["radius"], flags)


def unknown_site(site: str, reference: Mapping[str, Any]) -> list[str]:
    """A flag where a site is named that training did not have."""
    return [f"site {site} not in training"] if site and site not in reference["sites"] else []


def calibrator_of(model_folder: Path) -> Path:
    """artifacts/calibrate/<phase>/<method>/<seed> of artifacts/<phase>/<method>/<seed>."""
    phase, method, seed = model_folder.resolve().parts[-3:]
    return model_folder.resolve().parents[2] / "calibrate" / phase / method / seed


def calibration(folder: Path, model_folder: Path) -> tuple[dict[str, Any], FittedLinear | None]:
    """reference.json, and the calibrator (None where its fit was refused). Raises StageError where they belong to another model."""
    reference, path = read_json(folder / "reference.json"), folder / "calibrator.json"
    if (found := checksum(model_folder / "model.safetensors")) != reference["predictor_sha256"]:
        raise StageError(f"{folder}: made for the model {reference['predictor_sha256'][:12]}…, this one is {found[:12]}…; allowed: the calibrator of this very model")
    try:
        return reference, FittedLinear.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValidationError as error:
        raise StageError(f"{path}: not a fitted linear calibrator: {error}") from error


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the trained model, artifacts/<phase>/<method>/<seed>")
    parser.add_argument("folder", type=Path, help="folder of the new volumes")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"), help="the table to write")
    parser.add_argument("--calibrator", type=Path, help="folder with calibrator.json and reference.json; default: that of the model")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="volumes that cannot be used: stop, or leave them out")
    parser.add_argument("--batch", type=int, default=8, help="volumes a forward pass")
    given = parser.parse_args(words)
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)  # one line each, without our own source
    try:
        rows = predict(given.model, given.folder, given.out, given.calibrator, given.on_error, given.batch)
    except StageError as error:
        sys.exit(str(error))
    for row in rows:
        if row["qc_flags"]:
            print(f"{row['participant_id']} {row['session_id']}: {row['qc_flags']}", file=sys.stderr)
    print(f"{given.out}: {len(rows)} volumes, {sum(bool(row['qc_flags']) for row in rows)} flagged. Read MODEL_CARD.md before using them.")


if __name__ == "__main__":
    main()

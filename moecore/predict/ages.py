"""Predict ages of new volumes with a calibrated model; flag volumes unlike the training's.

N volumes, in years, from a BIDS folder, or any folder of NIfTI or .mgz files.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.brain import prediction_table
from moecore.core.config import read_json_settings
from moecore.core.files import UserError, file_checksum, join_below_root
from moecore.core.routing_records import RoutingRecord
from moecore.data.volumes.cohorts import SEX, read_delimited_table
from moecore.data.volumes.volume_preparation import Grid, read_volume
from moecore.measure.calibrators.base import FittedCalibrator, read_fitted
from moecore.nn.predict import predict_in_batches
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime

ENDINGS = (".nii.gz", ".nii", ".mgz")
# Ends of a brain mask's name, instead of _T1w or after the volume's full name.
MASKS = ("_desc-brain_mask", "_mask")
Participants = dict[tuple[str, str], dict[str, str]]  # (participant, session or "") → facts


class NewVolumeFile(NamedTuple):
    """One volume of a folder, and its subject."""

    path: Path
    mask: Path | None  # None: the brain is where the volume is above 0
    subject: dict[str, str]  # as a row of predictions.csv; "" is unknown
    root: Path  # the folder; links that leave it are refused


def find_volumes(folder: str | Path) -> list[NewVolumeFile]:
    """Return every T1-weighted volume of a folder, by name.

    BIDS: sub-*/[ses-*/]anat/*_T1w.nii[.gz]; else every .nii[.gz] or .mgz directly in the folder
    that is not a mask. participants.tsv may give age, sex and site by participant_id (in a plain
    folder the file's name without its ending) and session_id.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("sub-*/**/*_T1w.nii*") if _stem(path))
    bids = bool(paths)
    if not bids:
        named = [path for path in folder.glob("*") if _stem(path)]
        paths = sorted(path for path in named if not _stem(path).endswith(MASKS))
    if not paths:
        raise UserError(
            f"{folder}: no volumes; allowed: sub-*/anat/*_T1w.nii.gz below it (BIDS), or .nii.gz "
            "or .mgz files in it"
        )
    table = _participants(folder / "participants.tsv")
    return [NewVolumeFile(path, _mask(path), _subject(path, bids, table), folder) for path in paths]


def prepare_volumes(
    new_volumes: list[NewVolumeFile], reference: prediction_table.TrainingCohortRanges
) -> tuple[list[np.ndarray], list[str]]:
    """Return the usable volumes, float16 (1, D, H, W), and per volume why it is not, or ""."""
    edge, *other_edges = set(reference.data.voxel_mm)
    if other_edges:
        raise UserError.at(
            "reference.json", found="different voxel_mm per axis", allowed="one edge for all axes"
        )
    grid = Grid(voxel_mm=edge, size=reference.data.size)
    volumes = []
    reasons = []
    for volume in new_volumes:
        try:
            for path in filter(None, (volume.path, volume.mask)):
                join_below_root(volume.root, path)
            volumes.append(read_volume(volume.path, grid, volume.mask))
            reasons.append("")
        except UserError as error:
            reasons.append(str(error))
    return volumes, reasons


def _stem(path: Path) -> str:
    """Return the name without .nii, .nii.gz or .mgz; "" for another file, or a hidden one."""
    if path.name.startswith(".") or not path.name.endswith(ENDINGS):
        return ""
    return path.name.removesuffix(".mgz").removesuffix(".gz").removesuffix(".nii")


def _mask(path: Path) -> Path | None:
    stems = (_stem(path), _stem(path).removesuffix("_T1w"))
    places = [
        path.with_name(f"{stem}{end}{ending}")
        for stem in stems
        for end in MASKS
        for ending in ENDINGS
    ]
    return next((place for place in places if place.is_file()), None)


def _subject(path: Path, bids: bool, table: Participants) -> dict[str, str]:
    stem = _stem(path)
    participant = stem.split("_")[0] if bids else stem
    named = re.search(r"_(ses-[^_]+)", stem) if bids else None
    session = named[1] if named else ""
    facts = table.get((participant, session)) or table.get((participant, "")) or {}
    details = {"age": "", "sex": "", "site": "", "qc_flags": ""} | facts
    return {"participant_id": participant, "session_id": session} | details


def _participants(path: Path) -> Participants:
    """Read age, sex and site as in predictions.csv; {} without such a file."""
    if not join_below_root(path.parent, path).exists():
        return {}
    columns, rows = read_delimited_table(path)
    if rows and "participant_id" not in columns:
        raise UserError(f"{path}: lacks the column participant_id")
    problems = []
    table = {}
    for row in rows:
        who = f"{path}: {row['participant_id']!r:.60}"
        age = row.get("age", "").strip().replace("n/a", "")
        sex = row.get("sex", "").strip().lower()
        if age and not re.fullmatch(r"[0-9]{1,3}(\.[0-9]*)?", age):
            problems.append(f"{who}: age is {age!r}; allowed: a number of years, or n/a")
        if sex not in SEX:
            problems.append(f"{who}: sex is {row['sex']!r}; allowed: F, M, n/a")
        table[row["participant_id"], row.get("session_id", "")] = {
            "age": age,
            "sex": SEX.get(sex, ""),
            "site": row.get("site", "").replace("n/a", ""),
        }
    if problems:
        raise UserError("\n".join(problems))
    return table


class Calibration(NamedTuple):
    """Files of the stage ``calibrate``."""

    reference: prediction_table.TrainingCohortRanges
    fitted: FittedCalibrator | None  # None if its fit was refused


class NewAges(NamedTuple):
    """Predictions of the volumes of a folder."""

    rows: list[prediction_table.PredictionRow]  # one per usable volume
    volumes: np.ndarray  # usable volumes, (N, 1, D, H, W)
    routing: tuple[RoutingRecord, ...]  # of usable volumes, one per MoE layer
    left_out: list[tuple[NewVolumeFile, str]]  # unusable volumes, and why


def predict_ages(
    model_folder: Path, folder: Path, out: Path, calibrator: Path | None = None, batch: int = 8
) -> NewAges:
    """Predict every volume below ``folder``, and write predictions.csv.

    An unusable volume has a line with the reason in the column ``error``. Raises UserError for
    another model's calibrator, or if no volume is usable.
    """
    calibration = load_age_calibration(calibrator or calibrator_folder(model_folder), model_folder)
    new_volumes = find_volumes(folder)
    volumes, reasons = prepare_volumes(new_volumes, calibration.reference)
    used = [volume for volume, why in zip(new_volumes, reasons, strict=True) if not why]
    left_out = [(volume, why) for volume, why in zip(new_volumes, reasons, strict=True) if why]
    if not used:
        count = f"none of {len(new_volumes)} volumes can be used"
        raise UserError("\n".join([*(why for _, why in left_out), count]))
    usable = np.stack(volumes)
    model = load_model(model_folder).to(tune_runtime().device)
    outputs, routing = predict_in_batches(model, usable, batch)
    rows = new_age_rows(used, usable, outputs[:, 0].double().numpy(), calibration)
    lines_left_out = [(volume.subject, why) for volume, why in left_out]
    prediction_table.write_predictions(out, rows, lines_left_out)
    return NewAges(rows, usable, routing, left_out)


def new_age_rows(
    new_volumes: Sequence[NewVolumeFile],
    volumes: np.ndarray,
    raw: np.ndarray,
    calibration: Calibration,
) -> list[prediction_table.PredictionRow]:
    """Return rows of predictions.csv with flags, from volumes (N, 1, D, H, W) and raw ages (N,)."""
    reference = calibration.reference
    subjects = [volume.subject for volume in new_volumes]
    ages = [float(subject["age"]) if subject["age"] else None for subject in subjects]
    sexes = [subject["sex"] for subject in subjects]
    known_ages = np.array([np.nan if age is None else age for age in ages])
    corrected = prediction_table.correct_ages(raw, sexes, calibration.fitted, known_ages)
    flags = [
        prediction_table.quality_flags(volume, float(best), age, reference, subject["site"])
        for subject, volume, best, age in zip(subjects, volumes, corrected.best, ages, strict=True)
    ]
    return prediction_table.prediction_rows(
        subjects, "new", corrected, reference.interval.radius, flags
    )


def calibrator_folder(model_folder: Path) -> Path:
    """Return artifacts/calibrate/<phase>/<method>/<seed> of artifacts/<phase>/<method>/<seed>."""
    above = model_folder.absolute().parent
    phase = above.parent
    return phase.parent / "calibrate" / phase.name / above.name / model_folder.absolute().name


def load_age_calibration(folder: Path, model_folder: Path) -> Calibration:
    """Read the files of ``calibrate``; UserError if they are damaged, or of another model."""
    place = folder / "reference.json"
    if not place.is_file():
        raise UserError(
            f"{folder}: holds no reference.json, with the preparation and the ranges of training "
            "volumes; the stage `calibrate` writes it, --calibrator names another folder"
        )
    reference = read_json_settings(place, prediction_table.TrainingCohortRanges, "a reference")
    digest = file_checksum(model_folder / "model.safetensors")
    if digest != reference.predictor_sha256:
        wrong = f"made for the model {reference.predictor_sha256[:12]}…, this one is {digest[:12]}…"
        raise UserError(f"{folder}: {wrong}; allowed: the calibrator of this very model")
    path = folder / "calibrator.json"
    if not path.exists():
        return Calibration(reference, None)
    return Calibration(reference, read_fitted(path, "numbers"))

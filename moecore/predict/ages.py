"""Ages of new volumes by a trained and calibrated model, with flags for volumes unlike training.

N volumes, in years. They are found in a folder in BIDS form, or in any folder of NIfTI or .mgz
files, and prepared as the training data were.
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
# At the end of a brain mask's name, in the place of _T1w or after the whole name.
MASKS = ("_desc-brain_mask", "_mask")
Participants = dict[tuple[str, str], dict[str, str]]  # (participant, session or "") → facts


class NewVolumeFile(NamedTuple):
    """One volume of a folder, and what is known of its subject."""

    path: Path
    mask: Path | None  # None: the brain is where the volume is above 0
    subject: dict[str, str]  # as a row of predictions.csv; an age "" is unknown
    root: Path  # the folder; no link leads out of it


def find_volumes(folder: str | Path) -> list[NewVolumeFile]:
    """Every T1-weighted volume below ``folder``, in the order of their names.

    BIDS form: sub-*/[ses-*/]anat/*_T1w.nii[.gz]; else every .nii[.gz] or .mgz that is directly in
    the folder and is no mask. participants.tsv may give age, sex and site by participant_id (and
    session_id): in a plain folder that is the file's name without its ending.
    Raises UserError where there is no volume, or where participants.tsv has an age that is no
    number or a sex that is unknown.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("sub-*/**/*_T1w.nii*") if _stem(path))
    bids = bool(paths)
    if not bids:
        every = [path for path in folder.glob("*") if _stem(path)]
        paths = sorted(path for path in every if not _stem(path).endswith(MASKS))
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
    """Return the usable volumes, float16 (1, D, H, W), and for each of all why not, or ""."""
    edge, *others = set(reference.data.voxel_mm)
    if others:
        raise UserError("reference.json: found voxel_mm of unlike axes; allowed: one edge for all")
    grid = Grid(voxel_mm=edge, size=reference.data.size)
    volumes = []
    reasons = []
    for one in new_volumes:
        try:
            for path in filter(None, (one.path, one.mask)):
                join_below_root(one.root, path)
            volumes.append(read_volume(one.path, grid, one.mask))
            reasons.append("")
        except UserError as error:
            reasons.append(str(error))
    return volumes, reasons


def _stem(path: Path) -> str:
    """The name without .nii, .nii.gz or .mgz; "" for another file, or a hidden one."""
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
    known = {"age": "", "sex": "", "site": "", "qc_flags": ""} | facts
    return {"participant_id": participant, "session_id": session} | known


def _participants(path: Path) -> Participants:
    """Age, sex, site as in predictions.csv; {} where there is no such file."""
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
    """What the stage ``calibrate`` left beside a model."""

    reference: prediction_table.TrainingCohortRanges
    fitted: FittedCalibrator | None  # None where its fit was refused


class NewAges(NamedTuple):
    """What is said of the volumes of a folder."""

    rows: list[prediction_table.PredictionRow]  # of those that could be used
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
    prediction_table.write_predictions(out, rows, [(one.subject, why) for one, why in left_out])
    return NewAges(rows, usable, routing, left_out)


def new_age_rows(
    new_volumes: Sequence[NewVolumeFile],
    volumes: np.ndarray,
    raw: np.ndarray,
    calibration: Calibration,
) -> list[prediction_table.PredictionRow]:
    """Return the rows of predictions.csv, with flags for all in which a volume is unlike training.

    volumes: (N, 1, D, H, W); raw: (N,).
    """
    reference = calibration.reference
    subjects = [one.subject for one in new_volumes]
    ages = [float(subject["age"]) if subject["age"] else None for subject in subjects]
    sexes = [subject["sex"] for subject in subjects]
    known = np.array([np.nan if age is None else age for age in ages])
    said = prediction_table.correct_ages(raw, sexes, calibration.fitted, known)
    flags = [
        [
            *prediction_table.out_of_range_flags(volume, reference),
            *prediction_table.age_range_flags(float(best), age, reference),
            *prediction_table.unknown_site_flags(subject["site"], reference),
        ]
        for subject, volume, best, age in zip(subjects, volumes, said.best, ages, strict=True)
    ]
    return prediction_table.prediction_rows(subjects, "new", said, reference.interval.radius, flags)


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
    reference = read_json_settings(place, prediction_table.TrainingCohortRanges, "a reference")
    digest = file_checksum(model_folder / "model.safetensors")
    if digest != reference.predictor_sha256:
        wrong = f"made for the model {reference.predictor_sha256[:12]}…, this one is {digest[:12]}…"
        raise UserError(f"{folder}: {wrong}; allowed: the calibrator of this very model")
    path = folder / "calibrator.json"
    if not path.exists():
        return Calibration(reference, None)
    return Calibration(reference, read_fitted(path, "numbers"))

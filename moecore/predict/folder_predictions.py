"""Predict the files of a folder, pictures or volumes, and write a table and a page.

Volumes, of a BIDS folder or any folder of NIfTI or .mgz files, get calibrated ages in years, and
flags where they are unlike the training's. A file that cannot be read has a row with the reason.
"""

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.brain import age_predictions
from moecore.core.arrays_as_text import escape_spreadsheet_formula
from moecore.core.config import read_json_settings
from moecore.core.files import UserError, file_checksum, join_below_root, write_atomic, write_csv
from moecore.core.routing_records import RoutingRecord
from moecore.data.files.decode import BACKGROUND
from moecore.data.volumes import participants, volume_preparation
from moecore.measure.calibrators.base import FittedCalibrator, read_calibrator
from moecore.measure.routing_metrics.expert_profiles import find_two_tower_model
from moecore.nn.predict import predict_in_batches
from moecore.predict import pictures
from moecore.predict.model_quality import calibrator_folder, describe_model_quality
from moecore.tasks.image_text import ImageText
from moecore.training.artifacts import ModelCard, load_model, load_model_card
from moecore.training.runtime import tune_runtime

ENDINGS = (".nii.gz", ".nii", ".mgz")
# Ends of a brain mask's name, instead of _T1w or after the volume's full name.
MASK_NAME_ENDINGS = ("_desc-brain_mask", "_mask")
Participants = dict[tuple[str, str], dict[str, str]]  # (participant, session or "") → facts
NEEDED_MODEL_FILES = ("model.json", "model.safetensors")
MODEL_FOLDER_PATTERN = "artifacts/{pretrain,finetune,adversarial,prune,merge}/<method>/<seed>"


class NewVolumeFile(NamedTuple):
    path: Path
    mask: Path | None  # None: the brain is where the volume is above 0
    subject: dict[str, str]  # as a row of predictions.csv; "" is unknown
    root: Path  # the folder; links that leave it are refused


def find_volumes(folder: str | Path) -> list[NewVolumeFile]:
    # BIDS: sub-*/[ses-*/]anat/*_T1w.nii[.gz]; else every .nii[.gz] or .mgz directly in the folder
    # that is not a mask. participants.tsv may give age, sex and site by participant_id (in a plain
    # folder the file's name without its ending) and session_id.
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("sub-*/**/*_T1w.nii*") if _stem(path))
    bids = bool(paths)
    if not bids:
        named = [path for path in folder.glob("*") if _stem(path)]
        paths = sorted(path for path in named if not _stem(path).endswith(MASK_NAME_ENDINGS))
    if not paths:
        allowed = "sub-*/anat/*_T1w.nii.gz below it (BIDS), or .nii.gz or .mgz files in it"
        raise UserError(f"{folder}: no volumes; allowed: {allowed}")
    table = _read_participants(folder / "participants.tsv")
    return [
        NewVolumeFile(path, _find_mask_file(path), _build_subject_row(path, bids, table), folder)
        for path in paths
    ]


def prepare_volumes(
    new_volumes: list[NewVolumeFile], reference: age_predictions.TrainingCohortRanges
) -> Iterator[np.ndarray | str]:
    """Yield each volume on the voxel grid of training, float16 (1, D, H, W), or an error text."""
    edge, *other_edges = set(reference.data.voxel_mm)
    if other_edges:
        wrong = "found different voxel_mm per axis"
        raise UserError(f"reference.json: {wrong}; allowed: one edge for all axes")
    grid = volume_preparation.VoxelGrid(voxel_mm=edge, size=reference.data.size)
    for volume in new_volumes:
        try:
            for path in filter(None, (volume.path, volume.mask)):
                join_below_root(volume.root, path)
            yield volume_preparation.read_volume(volume.path, grid, volume.mask)
        except UserError as error:
            yield str(error)


def _stem(path: Path) -> str:
    """Return a file's name without .nii, .nii.gz or .mgz; "" for hidden and other files."""
    if path.name.startswith(".") or not path.name.endswith(ENDINGS):
        return ""
    return path.name.removesuffix(".mgz").removesuffix(".gz").removesuffix(".nii")


def _find_mask_file(path: Path) -> Path | None:
    stems = (_stem(path), _stem(path).removesuffix("_T1w"))
    names = map("".join, product(stems, MASK_NAME_ENDINGS, ENDINGS))
    return next((place for name in names if (place := path.with_name(name)).is_file()), None)


def _build_subject_row(path: Path, bids: bool, table: Participants) -> dict[str, str]:
    participant = _stem(path)
    session = ""
    if bids:
        session = "".join(re.findall(r"_(ses-[^_]+)", participant)[:1])
        participant = participant.split("_")[0]
    facts = table.get((participant, session)) or table.get((participant, "")) or {}
    details = {"age": "", "sex": "", "site": "", "qc_flags": ""} | facts
    return {"participant_id": participant, "session_id": session} | details


def _read_participants(path: Path) -> Participants:
    """Return (participant, session) → age, sex and site; {} if participants.tsv is missing."""
    if not join_below_root(path.parent, path).exists():
        return {}
    columns, rows = participants.read_text_table(path)
    if rows and "participant_id" not in columns:
        raise UserError(f"{path}: lacks the column participant_id")
    problems, table = [], {}
    for row in rows:
        who = f"{path}: {row['participant_id']!r:.60}"
        age = row.get("age", "").strip().replace("n/a", "")
        sex = row.get("sex", "").strip().lower()
        if age and not re.fullmatch(r"[0-9]{1,3}(\.[0-9]*)?", age):
            problems.append(f"{who}: age is {age!r}; allowed: a number of years, or n/a")
        if sex not in participants.SEX:
            problems.append(f"{who}: sex is {row['sex']!r}; allowed: F, M, n/a")
        key = (row["participant_id"], row.get("session_id", ""))
        site = row.get("site", "").replace("n/a", "")
        table[key] = {"age": age, "sex": participants.SEX.get(sex, ""), "site": site}
    if problems:
        raise UserError("\n".join(problems))
    return table


class CalibratorAndReference(NamedTuple):
    reference: age_predictions.TrainingCohortRanges
    fitted: FittedCalibrator | None  # None if its fit was refused


class NewAgePredictions(NamedTuple):
    rows: list[age_predictions.PredictionRow]  # one per usable volume
    volumes: np.ndarray  # usable volumes, (N, 1, D, H, W)
    routing: tuple[RoutingRecord, ...]  # of usable volumes, one per MoE layer
    left_out: list[tuple[NewVolumeFile, str]]  # unusable volumes, and why


def write_age_predictions(
    model_folder: Path, folder: Path, out: Path, calibrator: Path | None = None, batch: int = 8
) -> NewAgePredictions:
    # An unusable volume has a line with the reason in the column ``error``. calibrator: folder that
    # the stage ``calibrate`` wrote; None: the model's.
    calibration = load_age_calibration(calibrator or calibrator_folder(model_folder), model_folder)
    new_volumes = find_volumes(folder)
    decoded = prepare_volumes(new_volumes, calibration.reference)
    prepared = list(zip(new_volumes, decoded, strict=True))
    left_out = [(volume, why) for volume, why in prepared if isinstance(why, str)]
    volumes = [pixels for _, pixels in prepared if not isinstance(pixels, str)]
    subjects = [volume.subject for volume, pixels in prepared if not isinstance(pixels, str)]
    if not volumes:
        count = f"none of {len(new_volumes)} volumes can be used"
        raise UserError("\n".join([*(why for _, why in left_out), count]))
    usable = np.stack(volumes)
    model = load_model(model_folder).to(tune_runtime().device)
    outputs, routing = predict_in_batches(model, usable, batch)
    rows = new_age_rows(subjects, usable, outputs[:, 0].double().numpy(), calibration)
    unusable = [(volume.subject, why) for volume, why in left_out]
    age_predictions.write_predictions(out, rows, unusable)
    return NewAgePredictions(rows, usable, routing, left_out)


def new_age_rows(
    subjects: list[dict[str, str]],
    volumes: np.ndarray,
    raw: np.ndarray,
    calibration: CalibratorAndReference,
) -> list[age_predictions.PredictionRow]:
    """Return rows of predictions.csv for volumes (N, 1, D, H, W); raw: predicted ages (N,)."""
    reference = calibration.reference
    ages = [float(subject["age"]) if subject["age"] else None for subject in subjects]
    sexes = [subject["sex"] for subject in subjects]
    known_ages = np.array(ages, np.float64)  # NaN for None
    corrected = age_predictions.correct_ages(raw, sexes, calibration.fitted, known_ages)
    flags = [
        age_predictions.flag_volume(volume, float(best), age, reference, subject["site"])
        for subject, volume, best, age in zip(subjects, volumes, corrected.best, ages, strict=True)
    ]
    radius = reference.interval.radius
    return age_predictions.prediction_rows(subjects, "new", corrected, radius, flags)


def load_age_calibration(folder: Path, model_folder: Path) -> CalibratorAndReference:
    """Load reference.json and, if any, calibrator.json; UserError if made for another model."""
    place = folder / "reference.json"
    if not place.is_file():
        lacking = "holds no reference.json, with the preparation and the ranges of training volumes"
        mend = "the stage `calibrate` writes it, --calibrator names another folder"
        raise UserError(f"{folder}: {lacking}; {mend}")
    reference = read_json_settings(place, age_predictions.TrainingCohortRanges, "a reference")
    digest = file_checksum(model_folder / "model.safetensors")
    if digest != reference.predictor_sha256:
        wrong = f"made for the model {reference.predictor_sha256[:12]}…, this one is {digest[:12]}…"
        raise UserError(f"{folder}: {wrong}; allowed: the calibrator of this very model")
    path = folder / "calibrator.json"
    calibrator = read_calibrator(path, "numbers") if path.exists() else None
    return CalibratorAndReference(reference, calibrator)


class PredictionRequest(NamedTuple):
    model: Path
    folder: Path
    out: Path
    calibrator: Path | None = None
    batch: int = 64
    texts: Path | None = None


def predict_folder(request: PredictionRequest) -> int:
    """Predict a folder's files, write table and page, return how many have no prediction."""
    # With texts, also write a table of the best pictures of each text. Prints the written files,
    # and on stderr the files without a prediction. Wrong arguments are refused first.
    model, folder, out = request.model, request.folder, request.out
    card = load_trained_model_card(model)
    if card.image.task.long:
        raise UserError(f"{model}: found a model of text; it takes --prompt FILE and no FOLDER")
    has_texts = isinstance(card.image.task, ImageText)
    if has_texts and request.texts is None:
        takes = "it takes --texts FILE, with one text per line"
        raise UserError(f"{model}: found a model that compares pictures with texts; {takes}")
    if not has_texts and request.texts is not None:
        raise UserError(f"{model}: found a model without a text tower; it takes no --texts")
    if request.texts is not None and request.calibrator is not None:
        raise UserError("--calibrator: cosines are not calibrated; allowed: models of classes")
    page = out.with_suffix(".html")
    if page == out:
        raise UserError(f"{out}: the page next to the table has this name; --out predictions.csv")
    files = list_visible_files(folder, (out, page))
    check_writable(out)
    check_writable(page)
    is_volume = len(card.image.shape) == 3
    content = (
        _write_volume_predictions(request, card) if is_volume else _predict_images(request, files)
    )
    experts = 0 if card.moe is None else card.moe.experts.choices
    write_atomic(page, pictures.render_predictions(content._replace(experts=experts)))
    for remark in content.remarks:
        print(remark)
    print(f"{out} and {page}: {content.total} files")
    for name, reason in content.failures:
        print(f"{name}: {reason}", file=sys.stderr)
    if content.failures:
        count = f"{len(content.failures)} of {content.total} files have no prediction"
        print(f"{count}; the column error of {out} says why", file=sys.stderr)
    return len(content.failures)


def _predict_images(request: PredictionRequest, files: Sequence[Path]) -> pictures.PredictionsPage:
    model = load_model(request.model).to(tune_runtime().device)
    towers = find_two_tower_model(model)
    if towers is None or request.texts is None:
        texts = None
        reader = pictures.build_output_reader(request.model, request.calibrator)
    else:
        texts = pictures.embed_text_file(request.texts, towers, request.model)
        reader = pictures.build_nearest_text_reader(texts, towers.config.pairs)
    folder, batch = request.folder, request.batch
    rows, shown = pictures.predict_picture_files(folder, files, model, reader, batch)
    lines = pictures.tabulate_files(reader.columns, rows)
    write_csv(request.out, (map(escape_spreadsheet_formula, line) for line in lines))
    height, width = model.image.shape
    remarks = [describe_model_quality(request.model), reader.remark]
    centre = f"pictures: the centre square at {height} × {width} pixels"
    remarks.append(f"{centre}; transparent pixels are {BACKGROUND}")
    failures = [(row.file, row.error) for row in rows if row.error]
    names = (str(request.model), str(folder))
    content = pictures.PredictionsPage(*names, remarks, shown, len(rows), failures)
    if towers is None or texts is None:
        return content
    best, routed = pictures.rank_pictures(towers, texts, rows)
    table = request.out.with_name(f"{request.out.stem}_texts{request.out.suffix}")
    write_csv(table, (map(escape_spreadsheet_formula, line) for line in best))
    remarks.append(f"the best pictures of each text: {table}")
    moe = towers.config.text.moe
    return content._replace(texts=routed, text_experts=0 if moe is None else moe.experts.choices)


def _write_volume_predictions(
    request: PredictionRequest, card: ModelCard
) -> pictures.PredictionsPage:
    model, folder = request.model, request.folder
    ages = write_age_predictions(model, folder, request.out, request.calibrator, request.batch)
    failures = [(str(volume.path.relative_to(folder)), why) for volume, why in ages.left_out]
    flagged = [row for row in ages.rows if row.qc_flags]
    remarks = [describe_model_quality(model), "volumes: the three middle slices"]
    flags = f"{len(flagged)} of {len(ages.rows)} volumes are unlike the training volumes (qc_flags)"
    remarks.append(f"{flags}; read MODEL_CARD.md before using the ages")
    remarks += [f"{row.participant_id} {row.session_id}: {row.qc_flags}" for row in flagged]
    grid = card.backbone.grid(card.image)
    layers = [
        pictures.top_experts(record.combine, record.combine.shape[1] - math.prod(grid), grid)
        for record in ages.routing
    ]
    shown = []
    for number, row in enumerate(ages.rows[: pictures.MAX_SHOWN]):
        experts = [layer[number] for layer in layers]
        tiles = pictures.middle_slice_tiles(ages.volumes[number], experts)
        answer = f"{row.predicted_age:.1f} {card.image.task.score.unit}".strip()
        name = f"{row.participant_id} {row.session_id}".strip()
        shown.append(pictures.ShownFile(name, answer, tiles))
    total = len(ages.rows) + len(failures)
    return pictures.PredictionsPage(str(model), str(folder), remarks, shown, total, failures)


def load_trained_model_card(folder: Path) -> ModelCard:
    models = sorted(Path("artifacts").glob("*/*/*/model.json"))
    hint = f", such as {models[0].parent}" if models else f": {MODEL_FOLDER_PATTERN}"
    _check_is_folder(folder, f"MODEL is the folder of a trained model{hint}")
    missing = [name for name in NEEDED_MODEL_FILES if not (folder / name).is_file()]
    if missing:
        inner = next((path.parent for path in sorted(folder.rglob(NEEDED_MODEL_FILES[0]))), None)
        hint = hint if inner is None else f"; {inner} is one"
        raise UserError(f"{folder}: not a trained model, lacks {' and '.join(missing)}{hint}")
    return load_model_card(folder)


def list_visible_files(folder: Path, without: Sequence[Path] = ()) -> list[Path]:
    """Return all files below ``folder`` except hidden ones and ``without``, sorted."""
    needed = "FOLDER is a folder with the files to predict"
    _check_is_folder(folder, needed)
    # Unlike Path.resolve, realpath accepts a link to itself.
    excluded = {os.path.realpath(path) for path in without}
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or (path.is_symlink() and not path.is_dir()))  # also dangling links
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and os.path.realpath(path) not in excluded
    ]
    if not files:
        raise UserError(f"{folder}: holds no files; {needed}")
    return files


def _check_is_folder(folder: Path, needed: str) -> None:
    if not folder.is_dir():
        state = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {state}; {needed}")


def check_writable(path: Path) -> None:
    """Raise UserError unless ``path`` can be written; an existing file does not change."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; --out is the file to write")
    probe = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be written, {reason}; --out names another file") from error

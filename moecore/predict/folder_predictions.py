"""Predict the files of a folder, pictures or volumes, and write a table and a page.

A file that cannot be read has a row with the reason.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, write_whole
from moecore.data.files.decode import BACKGROUND
from moecore.measure.exploring.expert_gallery import find_two_towers
from moecore.predict import pictures
from moecore.predict.ages import NewAges, predict_ages
from moecore.tasks.image_text import ImageText
from moecore.training.artifacts import ModelCard, load_card, load_model
from moecore.training.runtime import tune_runtime

NEEDED = ("model.json", "model.safetensors")
TRAINED = "artifacts/{pretrain,finetune,adversarial,prune,merge}/<method>/<seed>"


class PredictionRequest(NamedTuple):
    model: Path
    folder: Path
    out: Path
    calibrator: Path | None = None
    batch: int = 64
    texts: Path | None = None


def predict_folder(request: PredictionRequest) -> int:
    """Write the table ``out`` and a page; return the number of files without a prediction.

    With texts, also write a table of their best pictures. Prints the written files, and on stderr
    the files without a prediction. Raises UserError before anything is computed.
    """
    model, folder, out = request.model, request.folder, request.out
    card = load_trained_model_card(model)
    if card.image.task.long:
        raise UserError(f"{model}: found a model of text; it takes --prompt FILE and no FOLDER")
    has_texts = isinstance(card.image.task, ImageText)
    if has_texts and request.texts is None:
        raise UserError(
            f"{model}: found a model that compares pictures with texts; it takes --texts FILE, "
            "with one text per line"
        )
    if not has_texts and request.texts is not None:
        raise UserError(f"{model}: found a model without a text tower; it takes no --texts")
    if request.texts is not None and request.calibrator is not None:
        raise UserError("--calibrator: cosines are not calibrated; allowed: models of classes")
    page = out.with_suffix(".html")
    if page == out:
        raise UserError(f"{out}: the page next to the table has this name; --out predictions.csv")
    files = list_files(folder, (out, page))
    check_writable(out)
    check_writable(page)
    content = _volumes(request, card) if len(card.image.shape) == 3 else _pictures(request, files)
    experts = 0 if card.moe is None else card.moe.experts.choices
    write_whole(page, pictures.render_predictions(content._replace(experts=experts)))
    for remark in content.remarks:
        print(remark)
    print(f"{out} and {page}: {content.total} files")
    for failure in content.failures:
        print(f"{failure.name}: {failure.reason}", file=sys.stderr)
    if content.failures:
        count = f"{len(content.failures)} of {content.total} files have no prediction"
        print(f"{count}; the column error of {out} says why", file=sys.stderr)
    return len(content.failures)


def _pictures(request: PredictionRequest, files: Sequence[Path]) -> pictures.PredictedPage:
    model = load_model(request.model).to(tune_runtime().device)
    towers = find_two_towers(model)
    if towers is None or request.texts is None:
        texts, reader = None, pictures.build_output_reader(request.model, request.calibrator)
    else:
        texts = pictures.read_texts(request.texts, towers, request.model)
        reader = pictures.nearest_caption_reader(texts, towers.config.pairs)
    rows, shown = pictures.predict_picture_files(
        request.folder, files, model, reader, request.batch
    )
    pictures.write_table(request.out, reader.columns, rows)
    height, width = model.image.shape
    remarks = [
        reader.remark,
        f"pictures: the centre square at {height} × {width} pixels; transparent pixels are "
        f"{BACKGROUND}",
    ]
    failures = [pictures.Failure(row.file, row.error) for row in rows if row.error]
    content = pictures.PredictedPage(
        str(request.model), str(request.folder), remarks, shown, len(rows), failures
    )
    if towers is None or texts is None:
        return content
    matches = pictures.match_texts_to_pictures(texts, rows)
    table = request.out.with_name(f"{request.out.stem}_texts{request.out.suffix}")
    pictures.write_best_pictures(table, texts, matches)
    remarks.append(f"the best pictures of each text: {table}")
    moe = towers.config.text.moe
    return content._replace(
        texts=pictures.texts_with_experts(towers, texts, matches),
        text_experts=0 if moe is None else moe.experts.choices,
    )


def _volumes(request: PredictionRequest, card: ModelCard) -> pictures.PredictedPage:
    model, folder = request.model, request.folder
    ages = predict_ages(model, folder, request.out, request.calibrator, request.batch)
    failures = [
        pictures.Failure(str(volume.path.relative_to(folder)), why) for volume, why in ages.left_out
    ]
    flagged = [row for row in ages.rows if row.qc_flags]
    remarks = [
        "volumes: the three middle slices",
        f"{len(flagged)} of {len(ages.rows)} volumes are unlike the training volumes "
        "(qc_flags); read MODEL_CARD.md before using the ages",
    ]
    remarks += [f"{row.participant_id} {row.session_id}: {row.qc_flags}" for row in flagged]
    total = len(ages.rows) + len(failures)
    return pictures.PredictedPage(
        str(model), str(folder), remarks, _slices(card, ages), total, failures
    )


def _slices(card: ModelCard, ages: NewAges) -> list[pictures.Shown]:
    grid = card.backbone.grid(card.image)
    layers = [
        pictures.experts_of(
            record.combine[: pictures.SHOWN], record.combine.shape[1] - math.prod(grid), grid
        )
        for record in ages.routing
    ]
    unit = card.image.task.score.unit
    return [
        pictures.Shown(
            f"{row.participant_id} {row.session_id}".strip(),
            f"{row.predicted_age:.1f} {unit}".strip(),
            pictures.middle_slice_tiles(ages.volumes[number], [layer[number] for layer in layers]),
        )
        for number, row in enumerate(ages.rows[: pictures.SHOWN])
    ]


def load_trained_model_card(folder: Path) -> ModelCard:
    """Read the settings of a trained model; UserError with a hint for another folder."""
    models = sorted(Path("artifacts").glob("*/*/*/model.json"))
    hint = f", such as {models[0].parent}" if models else f": {TRAINED}"
    _check_folder(folder, f"MODEL is the folder of a trained model{hint}")
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        inner = next((path.parent for path in sorted(folder.rglob(NEEDED[0]))), None)
        hint = hint if inner is None else f"; {inner} is one"
        raise UserError(f"{folder}: not a trained model, lacks {' and '.join(missing)}{hint}")
    return load_card(folder)


def list_files(folder: Path, without: Sequence[Path] = ()) -> list[Path]:
    """Return the files below ``folder`` that are not hidden, sorted, except ``without``."""
    needed = "FOLDER is a folder with the files to predict"
    _check_folder(folder, needed)
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


def _check_folder(folder: Path, needed: str) -> None:
    if not folder.is_dir():
        state = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {state}; {needed}")


def check_writable(path: Path) -> None:
    """Raise UserError unless a file can be written at ``path``; an existing file is kept."""
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

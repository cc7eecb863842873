"""Predictions of a trained model for the files of a folder: a table, and a page that shows them.

What a folder may hold depends on the model: pictures here, volumes in ``moecore.predict.ages``.
A file that cannot be read keeps its row, which says why.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, write_whole
from moecore.data.files.decode import BACKGROUND
from moecore.measure.exploring.caption_word_experts import find_two_towers
from moecore.predict.ages import NewAges, predict_ages
from moecore.predict.pictures import (
    SHOWN,
    Failure,
    PredictedPage,
    Shown,
    build_output_reader,
    experts_of,
    match_texts_to_pictures,
    middle_slice_tiles,
    nearest_caption_reader,
    predict_pictures,
    read_texts,
    render_predictions,
    texts_with_experts,
    write_best_pictures,
    write_table,
)
from moecore.tasks.image_text import ImageText
from moecore.training.artifacts import ModelCard, load_card, load_model
from moecore.training.runtime import tune_runtime

NEEDED = ("model.json", "model.safetensors")
TRAINED = "artifacts/{pretrain,finetune,adversarial,prune,merge}/<method>/<seed>"


class PredictionRequest(NamedTuple):
    """What the command line says of a folder of files."""

    model: Path
    folder: Path
    out: Path
    calibrator: Path | None = None
    batch: int = 64
    texts: Path | None = None


def predict_folder(given: PredictionRequest) -> int:
    """Write the table ``out`` and a page beside it, of texts also a table of their best pictures;
    returns how many files have no prediction.

    Says on stdout what was written, on stderr which files have no prediction. Raises UserError
    before anything is computed where the model, the folder or the table cannot be used.
    """
    model, folder, out = given.model, given.folder, given.out
    card = load_trained_model_card(model)
    if card.image.task.long:
        raise UserError(f"{model}: found a model of text; it takes --prompt FILE and no FOLDER")
    has_texts = isinstance(card.image.task, ImageText)
    if has_texts and given.texts is None:
        problem = f"{model}: found a model that compares pictures with texts"
        raise UserError(f"{problem}; it takes --texts FILE, with one text per line")
    if not has_texts and given.texts is not None:
        raise UserError(f"{model}: found a model without a text tower; it takes no --texts")
    if given.texts is not None and given.calibrator is not None:
        raise UserError("--calibrator: cosines are not calibrated; allowed: models of classes")
    beside = out.with_suffix(".html")
    if beside == out:
        raise UserError(f"{out}: the page beside the table has this name; --out predictions.csv")
    files = list_files(folder, (out, beside))
    check_writable(out)
    check_writable(beside)
    content = _volumes(given, card) if len(card.image.shape) == 3 else _pictures(given, files)
    experts = 0 if card.moe is None else card.moe.experts.choices
    write_whole(beside, render_predictions(content._replace(experts=experts)))
    for remark in content.remarks:
        print(remark)
    print(f"{out} and {beside}: {content.total} files")
    for failure in content.failures:
        print(f"{failure.name}: {failure.reason}", file=sys.stderr)
    if content.failures:
        count = f"{len(content.failures)} of {content.total} files have no prediction"
        print(f"{count}; the column error of {out} says why", file=sys.stderr)
    return len(content.failures)


def _pictures(given: PredictionRequest, files: Sequence[Path]) -> PredictedPage:
    model = load_model(given.model).to(tune_runtime().device)
    towers = find_two_towers(model)
    if towers is None or given.texts is None:
        texts, reading = None, build_output_reader(given.model, given.calibrator)
    else:
        texts = read_texts(given.texts, towers, given.model)
        reading = nearest_caption_reader(texts, towers.config.pairs)
    rows, shown = predict_pictures(given.folder, files, model, reading, given.batch)
    write_table(given.out, reading.columns, rows)
    rows_of_pixels, columns = model.image.shape
    about = f"pictures: the centre square at {rows_of_pixels} × {columns} pixels"
    remarks = [reading.remark, f"{about}; transparent pixels stand on {BACKGROUND}"]
    failures = [Failure(row.file, row.error) for row in rows if row.error]
    said = str(given.model), str(given.folder), remarks
    content = PredictedPage(*said, shown, len(rows), failures)
    if towers is None or texts is None:
        return content
    matches = match_texts_to_pictures(texts, rows)
    table = given.out.with_name(f"{given.out.stem}_texts{given.out.suffix}")
    write_best_pictures(table, texts, matches)
    remarks.append(f"the best pictures of each text: {table}")
    moe = towers.config.text.moe
    return content._replace(
        texts=texts_with_experts(towers, texts, matches),
        text_experts=0 if moe is None else moe.experts.choices,
    )


def _volumes(given: PredictionRequest, card: ModelCard) -> PredictedPage:
    model, folder = given.model, given.folder
    ages = predict_ages(model, folder, given.out, given.calibrator, given.batch)
    failures = [Failure(str(volume.path.relative_to(folder)), why) for volume, why in ages.left_out]
    flagged = [row for row in ages.rows if row.qc_flags]
    remarks = [
        "volumes: the three middle slices",
        f"{len(flagged)} of {len(ages.rows)} volumes are unlike those of the training "
        "(qc_flags); read MODEL_CARD.md before using the ages",
    ]
    remarks += [f"{row.participant_id} {row.session_id}: {row.qc_flags}" for row in flagged]
    total = len(ages.rows) + len(failures)
    return PredictedPage(str(model), str(folder), remarks, _slices(card, ages), total, failures)


def _slices(card: ModelCard, ages: NewAges) -> list[Shown]:
    grid = card.backbone.grid(card.image)
    layers = [
        experts_of(record.combine[:SHOWN], record.combine.shape[1] - math.prod(grid), grid)
        for record in ages.routing
    ]
    unit = card.image.task.score.unit
    return [
        Shown(
            f"{row.participant_id} {row.session_id}".strip(),
            f"{row.predicted_age:.1f} {unit}".strip(),
            middle_slice_tiles(ages.volumes[number], [layer[number] for layer in layers]),
        )
        for number, row in enumerate(ages.rows[:SHOWN])
    ]


def load_trained_model_card(folder: Path) -> ModelCard:
    """Return the settings of the trained model in ``folder``.

    Raises UserError that names ``folder`` where it is none, and where there may be one.
    """
    models = sorted(Path("artifacts").glob("*/*/*/model.json"))
    hint = f", such as {models[0].parent}" if models else f": {TRAINED}"
    _check_folder(folder, f"MODEL is the folder of a trained model{hint}")
    lacking = [name for name in NEEDED if not (folder / name).is_file()]
    if lacking:
        inner = next((path.parent for path in sorted(folder.rglob(NEEDED[0]))), None)
        hint = hint if inner is None else f"; {inner} is one"
        raise UserError(f"{folder}: not a trained model, lacks {' and '.join(lacking)}{hint}")
    return load_card(folder)


def list_files(folder: Path, without: Sequence[Path] = ()) -> list[Path]:
    """Return every file below ``folder`` that is not hidden, sorted; not those ``without``.

    Raises UserError where there is none.
    """
    needed = "FOLDER is a folder with the files to predict"
    _check_folder(folder, needed)
    left_out = {os.path.realpath(path) for path in without}  # of a link to itself, too
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or (path.is_symlink() and not path.is_dir()))  # a link to nothing
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and os.path.realpath(path) not in left_out
    ]
    if not files:
        raise UserError(f"{folder}: holds no files; {needed}")
    return files


def _check_folder(folder: Path, needed: str) -> None:
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {problem}; {needed}")


def check_writable(path: Path) -> None:
    """Raise UserError unless a file can be written at ``path``; what is there stays."""
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

"""Predictions of a trained model for the files of a folder: a table, and a page that shows them.

What a folder may hold depends on the model: pictures here, volumes in ``moecore.predict.ages``.
A file that cannot be read keeps its row, which says why.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, write_whole
from moecore.measure.exploring.words import find_two_towers
from moecore.nn.backbones.model import Model
from moecore.predict.ages import NewAges, predict_ages
from moecore.predict.captions import (
    compare_captions,
    nearest_pictures,
    read_texts,
    texts_with_experts,
    write_matches,
)
from moecore.predict.page import (
    SHOWN,
    Failure,
    PredictedPage,
    Shown,
    render_predictions,
    volume_tiles,
)
from moecore.predict.pictures import (
    Predicted,
    experts_of,
    predict_pictures,
    read_classes,
    write_table,
)
from moecore.tasks.image_text import ImageText
from moecore.training.artifacts import ModelCard, load_card, load_model
from moecore.training.runtime import tune_runtime

NEEDED = ("model.json", "model.safetensors")
TRAINED = "artifacts/{pretrain,finetune,adversarial}/<method>/<seed>"


def add_folder_arguments(words: argparse.ArgumentParser) -> None:
    """What a command line says of the folder and the table."""
    add = words.add_argument
    add("folder", metavar="FOLDER", type=Path, nargs="?", help="folder of the files to predict")
    add("--out", type=Path, help="the table to write, predictions.csv; of a text continued.html")
    add("--calibrator", type=Path, help="folder with calibrator.json; default: that of the model")
    add("--batch", type=int, default=64, help="files a forward pass")
    add("--texts", type=Path, help="of a model of captions: a file with one text per line")


class Given(NamedTuple):
    """What the command line says of a folder of files."""

    model: Path
    folder: Path
    out: Path
    calibrator: Path | None = None
    batch: int = 64
    texts: Path | None = None


def predict_folder(given: Given) -> int:
    """Write the table ``out`` and a page beside it, of texts also a table of their best pictures;
    returns how many files have no prediction.

    Says on stdout what was written, on stderr which files have no prediction. Raises UserError
    before anything is computed where the model, the folder or the table cannot be used.
    """
    given = given._replace(batch=max(1, given.batch))
    model, folder, out = given.model, given.folder, given.out
    card = model_card(model)
    if card.image.task.long:
        raise UserError(f"{model}: found a model of text; it takes --prompt FILE and no FOLDER")
    if isinstance(card.image.task, ImageText):
        check_texts(given)
    elif given.texts is not None:
        raise UserError(f"{model}: found a model without a text tower; it takes no --texts")
    beside = out.with_suffix(".html")
    if beside == out:
        raise UserError(f"{out}: the page beside the table has this name; --out predictions.csv")
    files = list_files(folder, (out, beside))
    check_writable(out)
    check_writable(beside)
    if len(card.image.shape) == 3:
        content = _volumes(given)
    else:
        content = _pictures(given, files)
    experts = 0 if card.moe is None else card.moe.experts.number
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


def check_texts(given: Given) -> None:
    """Raise UserError unless a model of captions gets texts, and no calibrator."""
    if given.texts is None:
        problem = f"{given.model}: found a model that compares pictures with texts"
        raise UserError(f"{problem}; it takes --texts FILE, with one text per line")
    if given.calibrator is not None:
        raise UserError("--calibrator: cosines are not calibrated; allowed: models of classes")


def _pictures(given: Given, files: Sequence[Path]) -> PredictedPage:
    model = load_model(given.model).to(tune_runtime().device)
    if given.texts is not None:
        return _matched(given, given.texts, files, model)
    reading = read_classes(given.model, given.calibrator)
    predicted = predict_pictures(given.folder, files, given.model, model, reading, given.batch)
    write_table(given.out, predicted)
    return _shown(given, predicted)


def _matched(given: Given, path: Path, files: Sequence[Path], model: Model) -> PredictedPage:
    towers = find_two_towers(model)
    assert towers is not None, "check_texts has looked at its task"
    texts = read_texts(path, towers, given.model)
    reading = compare_captions(texts, towers.config.pairs)
    table = given.out.with_name(f"{given.out.stem}_texts{given.out.suffix}")
    check_writable(table)
    predicted = predict_pictures(given.folder, files, given.model, model, reading, given.batch)
    matches = nearest_pictures(predicted)
    write_table(given.out, predicted)
    write_matches(table, texts.texts, matches)
    content = _shown(given, predicted)
    moe = towers.config.text.moe
    return content._replace(
        remarks=[*content.remarks, f"the best pictures of each text: {table}"],
        texts=texts_with_experts(towers, texts, matches),
        text_experts=0 if moe is None else moe.experts.number,
    )


def _shown(given: Given, predicted: Predicted) -> PredictedPage:
    failures = [Failure(row.file, row.error) for row in predicted.rows if row.error]
    return PredictedPage(
        str(given.model),
        str(given.folder),
        predicted.remarks,
        predicted.shown,
        len(predicted.rows),
        failures,
    )


def _volumes(given: Given) -> PredictedPage:
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
    return PredictedPage(str(model), str(folder), remarks, _slices(model, ages), total, failures)


def _slices(model: Path, ages: NewAges) -> list[Shown]:
    spec = load_card(model)
    grid = spec.backbone.grid(spec.image)
    layers = [
        experts_of(record.combine[:SHOWN, record.combine.shape[1] - math.prod(grid) :], 0, grid)
        for record in ages.routing
    ]
    unit = spec.image.task.score.unit
    return [
        Shown(
            f"{row.participant_id} {row.session_id}".strip(),
            f"{row.predicted_age:.1f} {unit}".strip(),
            volume_tiles(volume, [layer[number] for layer in layers]),
        )
        for number, (row, volume) in enumerate(
            zip(ages.rows[:SHOWN], ages.volumes[:SHOWN], strict=True)
        )
    ]


def model_card(folder: Path) -> ModelCard:
    """The settings of the trained model in ``folder``.

    Raises UserError that names ``folder`` where it is none, and where there may be one.
    """
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {problem}; MODEL is the folder of a trained model{_such_as()}")
    lacking = [name for name in NEEDED if not (folder / name).is_file()]
    if lacking:
        inner = next((path.parent for path in sorted(folder.rglob(NEEDED[0]))), None)
        hint = _such_as() if inner is None else f"; {inner} is one"
        raise UserError(f"{folder}: not a trained model, lacks {' and '.join(lacking)}{hint}")
    return load_card(folder)


def list_files(folder: Path, without: Sequence[Path] = ()) -> list[Path]:
    """Every file below ``folder`` that is not hidden, sorted; not those ``without``.

    Raises UserError where there is none.
    """
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {problem}; FOLDER is a folder with the files to predict")
    left_out = {os.path.realpath(path) for path in without}  # of a link to itself, too
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or (path.is_symlink() and not path.is_dir()))  # a link to nothing
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and os.path.realpath(path) not in left_out
    ]
    if not files:
        raise UserError(f"{folder}: holds no files; FOLDER is a folder with the files to predict")
    return files


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


def _such_as() -> str:
    """A hint at a model of the project in the current folder."""
    models = sorted(Path("artifacts").glob("*/*/*/model.json"))
    return f", such as {models[0].parent}" if models else f": {TRAINED}"

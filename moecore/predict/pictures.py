"""Predictions of a trained model for pictures of any size and mode: answers, numbers, experts.

A file that is no picture keeps its row, which says why.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import read_settings
from moecore.core.files import UserError, whole_text
from moecore.core.inside import path_inside
from moecore.core.plain import spreadsheet_cell
from moecore.data.files.decode import BACKGROUND, MODES, UnreadableImage, decode_image
from moecore.measure.calibrators.temperature import FittedTemperature
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predict_in_batches
from moecore.predict.ages import calibrator_folder
from moecore.predict.page import SHOWN, Shown, flat_tile
from moecore.run.progress import progress_bar
from moecore.training.artifacts import load_card


class Row(NamedTuple):
    """What is said of one file: the answer in words and the numbers behind it, or an error."""

    file: str
    prediction: str = ""
    probability: float | None = None  # of the answer; None where there are no classes
    numbers: tuple[float, ...] = ()  # the probability of every class, or the one number
    error: str = ""


class Reading(NamedTuple):
    """What a model's output becomes."""

    columns: tuple[str, ...]  # of Row.numbers
    row: Callable[[str, Tensor], Row]  # of a file's name and its output (K,)
    remark: str
    more: Callable[[Row], tuple[str, ...]] = lambda row: ()  # what the page says below the answer


class Predicted(NamedTuple):
    """All rows, in the order of the files; ``shown``: what a page shows of the first of them."""

    columns: tuple[str, ...]  # of Row.numbers
    rows: list[Row]
    shown: list[Shown]
    remarks: list[str]


def read_classes(model_folder: Path, calibrator: Path | None) -> Reading:
    """Probabilities of classes, or a number.

    calibrator: the folder of calibrator.json; None: that of the model, where there is one.
    """
    spec = load_card(model_folder).image
    fitted, remark = _calibrator(model_folder, calibrator, spec)
    columns = tuple(f"p({name})" for name in spec.task.classes) or spec.answers
    return Reading(
        columns,
        lambda name, output: row_of(name, calibrate_output(output, spec, fitted), spec),
        remark,
    )


def calibrate_output(output: Tensor, spec: ImageSpec, fitted: FittedTemperature | None) -> Tensor:
    """Calibrated probabilities (K,) of logits, or the number itself."""
    if not spec.task.classes:
        return output
    scaled = output if fitted is None else fitted.apply(output[None])[0]
    one = spec.task.needs_classes("one_class") is None
    return scaled.softmax(dim=0) if one else scaled.sigmoid()


def predict_pictures(
    folder: Path,
    files: Sequence[Path],
    model_folder: Path,
    model: Model,
    reading: Reading,
    batch: int,
) -> Predicted:
    """What the model says of every picture; files that are none keep a row with the reason.

    Raises UserError for a model of other images than pictures.
    """
    spec = model.image
    if spec.channels not in MODES:
        raise UserError(
            f"{model_folder}: takes images of {spec.channels} channels; pictures have 1 or 3"
        )
    rows: list[Row] = []
    shown: list[Shown] = []
    with progress_bar(f"predict {model_folder}", len(files)) as bar:
        for part, pixels, reasons in _decoded(folder, files, spec, batch):
            names = [as_text(path.relative_to(folder)) for path in part]
            said = _said(model, [one for one in pixels if one is not None], batch)
            for name, picture, reason in zip(names, pixels, reasons, strict=True):
                if picture is None:
                    rows.append(Row(name, error=reason))
                    continue
                output, experts = next(said)
                rows.append(reading.row(name, output))
                if len(shown) < SHOWN:
                    tile = flat_tile(picture, experts)
                    shown.append(
                        Shown(name, format_answer(rows[-1]), [tile], reading.more(rows[-1]))
                    )
            bar.update(len(rows))
    about = f"pictures: the centre square at {spec.shape[0]} × {spec.shape[1]} pixels; transparent "
    return Predicted(
        reading.columns, rows, shown, [reading.remark, f"{about}pixels stand on {BACKGROUND}"]
    )


def row_of(name: str, answer: Tensor, spec: ImageSpec) -> Row:
    """answer: (K,) probabilities of the classes, or (1,) a number in the target's unit."""
    numbers = tuple(answer.tolist())
    if not spec.task.classes:
        return Row(name, f"{numbers[0]:.4f}", None, numbers)
    best = int(answer.argmax())
    return Row(name, spec.task.classes[best], numbers[best], numbers)


def format_answer(row: Row) -> str:
    """The answer as the page says it."""
    if row.probability is None:
        return row.prediction
    return f"{row.prediction}, {100 * row.probability:.1f} %"


def write_table(path: Path, predicted: Predicted) -> None:
    """One line per file: file, prediction, probability, the number of each column, error."""
    with whole_text(path) as handle:
        writer = csv.writer(handle, lineterminator="\n")
        head = ("file", "prediction", "probability", *predicted.columns, "error")
        writer.writerow(map(spreadsheet_cell, head))
        for row in predicted.rows:
            numbers = [f"{value:.6g}" for value in row.numbers] or [""] * len(predicted.columns)
            probability = "" if row.probability is None else f"{row.probability:.6g}"
            cells = (row.file, row.prediction, probability, *numbers, row.error)
            writer.writerow(map(spreadsheet_cell, cells))


def _decoded(
    folder: Path, files: Sequence[Path], spec: ImageSpec, batch: int
) -> Iterator[tuple[Sequence[Path], list[np.ndarray | None], list[str]]]:
    """Files, pictures uint8 (C, H, W) and reasons, some at a time; None where it is no picture."""

    def read(path: Path) -> tuple[np.ndarray | None, str]:
        try:
            return decode_image(path_inside(folder, path), spec.shape[0], spec.channels), ""
        except (UnreadableImage, UserError) as error:
            return None, str(error)

    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            read_ones = list(pool.map(read, part))
            yield part, [picture for picture, _ in read_ones], [why for _, why in read_ones]


def as_text(path: Path) -> str:
    """A file's name on one line of UTF-8: what is no letter is escaped, as \\n is."""
    return "".join(
        letter.encode("unicode_escape").decode() if category(letter) in ("Cc", "Cs") else letter
        for letter in path.as_posix()
    )


def _said(
    model: Model, pictures: list[np.ndarray], batch: int
) -> Iterator[tuple[Tensor, list[np.ndarray]]]:
    """The output (K,) for each picture, and its experts in every layer, see ``experts_of``."""
    if not pictures:
        return
    outputs, records = predict_in_batches(model, np.stack(pictures), batch)
    layers = [
        experts_of(record.combine, layout.special, layout.grid)
        for record, layout in zip(records, model.layouts, strict=True)
    ]
    for number, output in enumerate(outputs):
        yield output, [layer[number] for layer in layers]


def experts_of(combine: Tensor, special: int, grid: tuple[int, ...], most: int = 2) -> np.ndarray:
    """The experts that process each patch, the one with most weight first.

    combine: (B, special + patches of the grid, E). Returns int16 (B, *grid, min(most, E)); -1
    where there is no such expert.
    """
    weights, experts = combine[:, special:].topk(min(most, combine.shape[-1]))
    chosen = torch.where(weights > 0, experts, -1)
    return chosen.view(len(combine), *grid, -1).numpy().astype(np.int16)


def _calibrator(
    model_folder: Path, folder: Path | None, spec: ImageSpec
) -> tuple[FittedTemperature | None, str]:
    """The fitted temperature, and a remark on whether there is one."""
    if not spec.task.classes:
        return None, "predictions as they are: a number has no probability"
    path = (folder or calibrator_folder(model_folder)) / "calibrator.json"
    if not path.is_file():
        if folder is not None:
            raise UserError(
                f"{path}: no such file; --calibrator is a folder that `calibrate` wrote"
            )
        return None, f"probabilities are not calibrated: there is no {path}"
    fitted = read_settings(path, FittedTemperature, "a fitted temperature")
    return fitted, f"probabilities are calibrated: temperature {fitted.temperature:.4g} of {path}"

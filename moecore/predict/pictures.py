"""Predictions of a trained model for pictures of any size and mode: answers, numbers, experts.

A file that is no picture keeps its row, which says why.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError, atomic_text_file, join_below_root
from moecore.core.plain_values import spreadsheet_cell
from moecore.data.files.decode import MODES, UnreadableImage, decode_image
from moecore.measure.calibrators.base import FittedCalibrator, read_fitted
from moecore.measure.calibrators.temperature import FittedTemperature
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.predict.ages import calibrator_folder
from moecore.predict.pictures import SHOWN, Shown, picture_tile_with_experts
from moecore.run.progress import report_progress
from moecore.tasks.base import Task
from moecore.training.artifacts import load_card


class Row(NamedTuple):
    """What is said of one file: the answer in words and the numbers behind it, or an error."""

    file: str = ""
    prediction: str = ""
    probability: float | None = None  # of the answer; None where there are no classes
    numbers: tuple[float, ...] = ()  # the probability of every class, or the one number
    error: str = ""
    more: Sequence[str] = ()  # what the page says below the answer

    @property
    def answer(self) -> str:
        """Return the answer as the page says it."""
        if self.probability is None:
            return self.prediction
        return f"{self.prediction}, {100 * self.probability:.1f} %"


class OutputReader(NamedTuple):
    """What a model's output becomes."""

    columns: tuple[str, ...]  # of Row.numbers
    row: Callable[[Tensor], Row]  # of an output (K,)
    remark: str


def build_output_reader(model_folder: Path, calibrator: Path | None) -> OutputReader:
    """Return the reading of logits as calibrated probabilities of classes, or as a number.

    calibrator: the folder of calibrator.json; None: that of the model, where there is one.
    """
    task = load_card(model_folder).image.task
    if not task.classes:
        remark = "predictions as they are: a number has no probability"
        return OutputReader(
            task.answers,
            lambda output: Row(prediction=f"{output[0]:.4f}", numbers=(float(output[0]),)),
            remark,
        )
    if task.cells > 1:
        return _build_cell_reader(task)
    path = (calibrator or calibrator_folder(model_folder)) / "calibrator.json"
    fitted: FittedCalibrator = FittedTemperature(temperature=1.0)
    remark = f"probabilities are not calibrated: there is no {path}"
    if path.is_file():
        fitted = read_fitted(path, "classes")
        remark = f"probabilities are calibrated: {fitted.summary} of {path}"
    elif calibrator is not None:
        raise UserError(f"{path}: no such file; --calibrator is a folder that `calibrate` wrote")

    def row(output: Tensor) -> Row:
        scaled = fitted.apply(output[None])[0]
        one = task.needs_classes("one_class") is None
        probs = scaled.softmax(dim=0) if one else scaled.sigmoid()
        best = int(probs.argmax())
        return Row("", task.classes[best], float(probs[best]), tuple(probs.tolist()))

    return OutputReader(tuple(f"p({name})" for name in task.classes), row, remark)


def _build_cell_reader(task: Task) -> OutputReader:
    """Return the reading of a mosaic's logits (G² · K,) as the best class of each cell."""

    def row(output: Tensor) -> Row:
        probs = output.unflatten(0, (task.cells, -1)).softmax(dim=-1)
        best = [task.classes[place] for place in probs.argmax(dim=-1).tolist()]
        return Row("", ", ".join(best), numbers=tuple(probs.flatten().tolist()))

    cells = range(1, task.cells + 1)
    columns = tuple(f"p({name}) of cell {cell}" for cell in cells for name in task.classes)
    return OutputReader(columns, row, "probabilities are not calibrated: each cell has its own")


def predict_pictures(
    folder: Path, files: Sequence[Path], model: Model, reading: OutputReader, batch: int
) -> tuple[list[Row], list[Shown]]:
    """Return a row per file, in order, and what a page shows of the first pictures.

    Raises UserError for a model of other images than pictures.
    """
    spec = model.image
    if spec.channels not in MODES:
        raise UserError(f"model: takes images of {spec.channels} channels; pictures have 1 or 3")

    if model.moe is not None and "truth" in model.moe.router.wants:
        raise UserError("model: is routed by the truth, which pictures do not say")

    def decode_file(path: Path) -> np.ndarray | str:
        try:
            return decode_image(join_below_root(folder, path), spec.shape[0], spec.channels)
        except (UnreadableImage, UserError) as error:
            return str(error)

    rows: list[Row] = []
    shown: list[Shown] = []
    with report_progress("predict", len(files)) as bar, ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            decoded = list(pool.map(decode_file, part))
            pictures = [one for one in decoded if not isinstance(one, str)]
            outputs = _outputs_with_experts(model, pictures, batch)
            for path, picture in zip(part, decoded, strict=True):
                name = escape_control_letters(path.relative_to(folder))
                if isinstance(picture, str):
                    rows.append(Row(name, error=picture))
                    continue
                output, experts = next(outputs)
                row = reading.row(output)._replace(file=name)
                rows.append(row)
                if len(shown) < SHOWN:
                    shown.append(
                        Shown(
                            name,
                            row.answer,
                            [picture_tile_with_experts(picture, experts)],
                            row.more,
                        )
                    )
            bar.update(len(rows))
    return rows, shown


def _outputs_with_experts(
    model: Model, pictures: Sequence[np.ndarray], batch: int
) -> Iterator[tuple[Tensor, list[np.ndarray]]]:
    """Yield the output (K,) for each picture, and its experts in every layer (``experts_of``)."""
    if not pictures:
        return
    outputs, records = predict_in_batches(model, np.stack(pictures), batch)
    layers = [
        experts_of(record.combine, layout.special, layout.grid)
        for record, layout in zip(records, model.layouts, strict=True)
    ]
    for number, output in enumerate(outputs):
        yield output, [layer[number] for layer in layers]


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a line per file: file, prediction, probability, the number of each column, error."""
    lines: list[Sequence[str]] = [("file", "prediction", "probability", *columns, "error")]
    for row in rows:
        numbers = [f"{value:.6g}" for value in row.numbers] or [""] * len(columns)
        probability = "" if row.probability is None else f"{row.probability:.6g}"
        lines.append((row.file, row.prediction, probability, *numbers, row.error))
    write_csv(path, lines)


def write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write rows whose texts no spreadsheet takes for formulas."""
    with atomic_text_file(path) as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerows(map(spreadsheet_cell, row) for row in rows)


def escape_control_letters(path: Path) -> str:
    """Return a file's name on one line of UTF-8: what is no letter is escaped, as \\n is."""
    return "".join(
        letter.encode("unicode_escape").decode() if category(letter) in ("Cc", "Cs") else letter
        for letter in path.as_posix()
    )


def experts_of(combine: Tensor, special: int, grid: tuple[int, ...], most: int = 2) -> np.ndarray:
    """Return the experts that process each patch, the one with most weight first.

    combine: (B, special + patches of the grid, E). Returns int16 (B, *grid, min(most, E)); -1
    where there is no such expert.
    """
    weights, experts = combine[:, special:].topk(min(most, combine.shape[-1]))
    chosen = torch.where(weights > 0, experts, -1)
    return chosen.view(len(combine), *grid, -1).numpy().astype(np.int16)

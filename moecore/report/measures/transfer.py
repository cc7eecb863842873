"""Images that were made on one method's model, scored by another's: a matrix of methods."""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.transfer import Result, TransferCell
from moecore.report.column import score_title
from moecore.report.figures.charts import Labels, draw_heatmap
from moecore.report.measures.result_display import Figures
from moecore.report.page.view import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.pictures.robustness import MARKS, attack_title
from moecore.report.tables.number_format import NumberFormat, format_epsilon, shorten_epsilons
from moecore.report.typed_results import Phase


def figures(result: Result) -> Figures:
    if result.cells:
        yield "transfer", draw_transfer_matrix(result)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The matrix as numbers and in colour, and what it says of the attacks."""
    result = phase.together.get(Result)
    if result is None:
        return
    verdict = f"{MARKS[result.reading.holds]}: {shorten_epsilons(result.reading.text)}"
    words = [
        f"{attack_title(result.attack)} at ε = {format_epsilon(result.epsilon)} on "
        f"{result.images} test images. A row: the model on which the images were made. "
        "A column: the model that scores them. On the diagonal stands the direct attack; below the "
        "other scores their difference from it, with an interval that holds for the whole matrix "
        "at 95 %. An attack from elsewhere that does more harm than the direct one says that the "
        "direct one is too weak to be believed (Carlini et al., 2019)."
    ]
    drawn = [Picture(figure, f"{phase.name}: {name}") for name, figure in figures(result)]
    notes = [f"No image is made on {name}: {reason}." for name, reason in result.skipped.items()]
    if phase.seeds > 1:
        notes.append("First seed.")
    yield Block(
        "Transfer of attacks", words, [transfer_table(result)], drawn, below=notes, finding=verdict
    )


def transfer_table(result: Result) -> PageTable:
    cells = {(cell.made_on, cell.scored_by): cell for cell in result.cells}
    form = result.task.score.form
    lines = [
        TableRow(
            PageCell(source),
            [format_transfer_cell(cells.get((source, target)), form) for target in result.methods],
        )
        for source in result.methods
        if source not in result.skipped
    ]
    return PageTable(["Made on", *result.methods], lines)


def format_transfer_cell(cell: TransferCell | None, form: str) -> PageCell:
    """A score, and how far it lies from the direct attack's."""
    if cell is None:
        return NONE
    text = NumberFormat(form).value(cell.score.value)
    if cell.made_on == cell.scored_by:
        return PageCell(text, "direct", look="direct", value=cell.score.value)
    difference = cell.difference
    if difference is None:
        return PageCell(text, value=cell.score.value)
    number_format = NumberFormat.of(form, [difference.interval])
    small = number_format.difference(difference.value)
    if limits := number_format.difference_limits(difference.interval):
        small = f"{small} ({limits})"
    return PageCell(text, small, value=cell.score.value)


def draw_transfer_matrix(result: Result) -> Figure:
    """Scores in colour: dark where much of the score is left, or where the error is large."""
    lines = transfer_table(result).lines
    values = np.array([[item.value for item in line.items] for line in lines], dtype=float)
    texts = [[item.text.removesuffix(" %") for item in line.items] for line in lines]
    score = result.task.score
    shades = values
    if score.form != "share":
        shades = values / np.nanmax(values)
    labels = Labels(
        f"{score_title(score)} under transferred {attack_title(result.attack)}",
        [line.head.text for line in lines],
        result.methods,
        "scored by",
        "made on",
        slanted=True,
    )
    size = (1.9 + 0.5 * len(result.methods), 1.7 + 0.36 * len(lines))
    caption = "Of the images that were made on each model."
    return draw_heatmap(shades, np.where(np.isnan(values), "", texts), labels, size, caption)

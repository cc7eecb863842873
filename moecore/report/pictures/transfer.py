"""Transfer of attacks: a matrix of the attacked and the scoring methods."""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.transfer import Transfer
from moecore.measure.values import Found
from moecore.report.column import score_title
from moecore.report.figures.charts import Labels, draw_heatmap
from moecore.report.page.page_objects import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.pictures.robustness import MARKS, attack_title
from moecore.report.results import Figures
from moecore.report.study_results import Phase
from moecore.report.tables.cells import NumberFormat, format_epsilon, shorten_epsilons
from moecore.tasks.base import Score


def figures(result: Found) -> Figures:
    if result.values:
        yield "transfer", draw_transfer_matrix(result)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a block with scores of transferred attacks, as table and heatmap, and a verdict."""
    result: Found | None = phase.together.get(Transfer)
    if result is None:
        return
    facts = result.facts
    reading = facts["reading"]
    verdict = f"{MARKS[reading['holds']]}: {shorten_epsilons(reading['text'])}"
    text = (
        f"{attack_title(facts['attack'])} at ε = {format_epsilon(facts['epsilon'])} on "
        f"{facts['images']} test images. A row: the model on which the images were made. "
        "A column: the model that scores them. The diagonal is the direct attack; the other scores "
        "have their difference from it below, with intervals that hold simultaneously at 95 %. If "
        "a transferred attack does more harm than the direct one, the direct one is too weak to be "
        "believed (Carlini et al., 2019)."
    )
    pictures = [Picture(figure, f"{phase.name}: {name}") for name, figure in figures(result)]
    notes = [f"No image is made on {name}: {reason}." for name, reason in facts["skipped"].items()]
    if phase.seeds > 1:
        notes.append("First seed.")
    grids = [transfer_table(result)]
    yield Block("Transfer of attacks", [text], grids, pictures, below=notes, finding=verdict)


def transfer_table(result: Found) -> PageTable:
    methods = result.facts["methods"]
    lines = [
        TableRow(PageCell(source), [transfer_cell(result, source, target) for target in methods])
        for source in methods
        if source not in result.facts["skipped"]
    ]
    return PageTable(["Made on", *methods], lines)


def transfer_cell(result: Found, source: str, target: str) -> PageCell:
    at = {"made_on": source, "scored_by": target}
    form = result.facts["score"]["form"]
    score = result.find("transferred", **at)
    difference = result.interval("transferred_difference", **at)
    if score is None:
        return NONE
    text = NumberFormat(form).value(score.value)
    if source == target:
        return PageCell(text, "direct", look="direct", value=score.value)
    if difference is None:
        return PageCell(text, value=score.value)
    number_format = NumberFormat.of(form, [difference])
    small = number_format.difference(difference.value)
    if limits := number_format.difference_limits(difference):
        small = f"{small} ({limits})"
    return PageCell(text, small, value=score.value)


def draw_transfer_matrix(result: Found) -> Figure:
    """Draw a heatmap of the scores, attacked × scoring model; dark: high score or large error."""
    lines = transfer_table(result).lines
    values = np.array([[item.value for item in line.items] for line in lines], dtype=float)
    texts = [[item.text.removesuffix(" %") for item in line.items] for line in lines]
    score = Score(**result.facts["score"])
    shades = values if score.form == "share" else values / np.nanmax(values)
    title = f"{score_title(score)} under transferred {attack_title(result.facts['attack'])}"
    names = [line.head.text for line in lines]
    methods = result.facts["methods"]
    labels = Labels(title, names, methods, "scored by", "made on", slanted=True)
    size = (1.9 + 0.5 * len(methods), 1.7 + 0.36 * len(lines))
    caption = "Of the images that were made on each model."
    return draw_heatmap(shades, np.where(np.isnan(values), "", texts), labels, size, caption)

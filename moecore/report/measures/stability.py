"""Predictions and choices of experts under noise (PRC, figures 1 and 5)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.exploring.expert_overlay_data import parse_expert_grid
from moecore.measure.noise_ramp import RampSummary
from moecore.measure.stability import NoiseRow, NoisyOverlays, Result
from moecore.report.column import (
    SCORE,
    Column,
    ColumnContext,
    ContextDependentColumns,
    decode_items,
    mean_or_none,
    score_interval_kind,
    score_slug,
    score_title,
    unit_suffix,
)
from moecore.report.figures.charts import ChartSpec
from moecore.report.figures.drawing import (
    PALETTE,
    add_legend_below,
    empty_figure,
    line_look,
    set_percent_axis,
    styled_drawing,
)
from moecore.report.figures.sheets import (
    SheetLabels,
    Tile,
    displayable_image,
    patch_expert_colours,
    sheet,
)
from moecore.report.measures.result_display import (
    Figures,
    Shown,
    draw_method_curves,
    first_seed_pictures,
    items_reader,
)
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase
from moecore.statistics.intervals import Interval


def largest_noise_reader(read: Callable[[NoiseRow], Any]) -> Callable[[Result], Any]:
    """Return what reads the row of the largest sigma."""
    return lambda result: read(max(result.noise, key=lambda row: row.sigma))


def largest_noise_score_columns(seen: ColumnContext) -> list[Column]:
    known = seen.task.score
    return [
        Column(
            f"noise_{score_slug(known)}",
            f"{score_title(known)}{unit_suffix(known)}, noise",
            largest_noise_reader(lambda row: Interval(row.score, row.low, row.high)),
            known.better,
            known.form,
            "under the largest noise",
            "prc",
            items=largest_noise_reader(items_reader("score")),
            limits=score_interval_kind(known),
        )
    ]


COLUMNS = (
    ContextDependentColumns(
        largest_noise_score_columns, lambda ahead: [f"noise_{ahead.score}"], SCORE, SCORE
    ),
    Column(
        "noise_selection_change",
        "Selection change, noise",
        largest_noise_reader(lambda row: mean_or_none(row.selection_change)),
        "lower",
        note="1 − IoU of the chosen experts under the largest noise, mean over layers",
        paper="prc",
        items=largest_noise_reader(items_reader("selection_change")),
    ),
    Column(
        "noise_agreement",
        "Same expert, noise",
        largest_noise_reader(lambda row: row.agreement),
        "higher",
        "share",
        "tokens whose first expert stays under that noise",
        "prc",
        items=largest_noise_reader(items_reader("agreement")),
    ),
    Column(
        "jumps",
        "Prediction jumps",
        lambda result: result.ramp.jumps_mean,
        "lower",
        note="steps along a ramp of noise in which the true class's probability jumps, mean over "
        "images",
        paper="prc",
        items=lambda result: decode_items(result.ramp.jumps_items),
    ),
)


def figures(result: Result) -> Figures:
    if result.ramp.shown:
        yield "noise_ramp", draw_probability_ramp(result.ramp)
    if result.overlays:
        yield "noise_overlays", noise_overlays(result.overlays)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The choice of experts and the score under noise; ramps and patches of each method."""
    known = phase.task.score
    sigma = "σ of the noise"
    changed = ChartSpec(
        "Selection change under noise", sigma, "1 − IoU of experts", True, height=3.2
    )
    title = score_title(known)
    axis = title + unit_suffix(known)
    scores = ChartSpec(f"{title} under noise", sigma, axis, known.form == "share", height=3.2)
    images = phase.results(Result)[0].images

    def changes(result: Result) -> dict[float, float | None]:
        return {row.sigma: mean_or_none(row.selection_change) for row in result.noise}

    def scores_of(result: Result) -> dict[float, float]:
        return {row.sigma: row.score for row in result.noise}

    drawn = draw_method_curves(phase, Result, changes, changed, "Mean over MoE layers.")
    drawn += draw_method_curves(phase, Result, scores_of, scores, f"{images} test images.")
    yield Block("Noise", pictures=drawn, about="noise_selection_change")
    title = "Predictions along a ramp, and patches under noise"
    yield Block(title, pictures=first_seed_pictures(phase, Result, figures), about="jumps")


@styled_drawing
def draw_probability_ramp(ramp: RampSummary) -> Figure:
    """The true class's probability of a few images over noise; a cross where it changes."""
    caption = "A few images. A cross: another class is predicted."
    figure = empty_figure(4.8, 3.5, caption)
    axes = figure.subplots()
    for number, curve in enumerate(ramp.shown):
        look = line_look(number) | {"marker": ""}
        axes.plot(ramp.sigmas, curve.probability, label=f"image {curve.index}", **look)
        predicted = np.array(curve.predicted)
        changed = 1 + (predicted[1:] != predicted[:-1]).nonzero()[0]
        axes.plot(
            np.array(ramp.sigmas)[changed],
            np.array(curve.probability)[changed],
            linestyle="",
            marker="x",
            color=look["color"],
        )
    axes.set(xlabel="σ of the noise", title="Prediction along a noise ramp", ylim=(-0.02, 1.02))
    set_percent_axis(axes, "Probability of the true class")
    add_legend_below(figure, axes)
    return figure


def noise_overlays(stored: tuple[NoisyOverlays, ...], layer: int = -1) -> Figure:
    """Images with the number of each patch's expert in one MoE layer; a row per sigma, clean first.

    A patch is tinted where its expert is not that of the clean image.
    """
    clean = stored[0]
    tiles = []
    for row in stored:
        line = []
        for number, image in enumerate(row.images()):
            grid = parse_expert_grid(row.grids[layer][number])
            changed = grid != parse_expert_grid(clean.grids[layer][number])
            words = np.where(grid < 0, "–", grid.astype(str))
            tint = patch_expert_colours(np.where(changed, 0, -1), (PALETTE[1],))
            line.append(Tile(displayable_image(image), tint, words))
        tiles.append(line)
    rows = [{0.0: "clean"}.get(row.sigma, f"σ = {row.sigma:g}") for row in stored]
    caption = "Last MoE layer. Tinted: another expert."
    frame = SheetLabels("Experts under noise: changed ones are tinted", rows, caption=caption)
    return sheet(tiles, frame, 1.5, 1.5)


SHOWN = Shown("stability", "stability under noise", Result, COLUMNS, figures, phase_blocks, place=8)

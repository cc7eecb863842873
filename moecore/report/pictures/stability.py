"""Predictions along a ramp of noise, and experts of patches under noise (PRC, figures 1 and 5)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moecore.measure.exploring.expert_gallery import Overlays, parse_expert_grid
from moecore.measure.stability import Stability
from moecore.measure.values import Found
from moecore.report.figures import drawing
from moecore.report.figures.drawing import Figure
from moecore.report.page.page_objects import Block
from moecore.report.results import Figures, Pictures, first_seed_pictures
from moecore.report.study_results import Phase


def figures(result: Found) -> Figures:
    if result.facts["ramp"]["shown"]:
        yield "noise_ramp", draw_probability_ramp(result.facts["ramp"])
    rows = {
        row["sigma"]: Overlays.model_validate(row["overlays"])
        for row in result.facts.get("overlays", ())
    }
    if rows:
        yield "noise_overlays", draw_noise_overlays(rows)


def ramps_and_patches(phase: Phase) -> Iterator[Block]:
    pictures = first_seed_pictures(phase, Stability, figures)
    title = "Predictions along a ramp, and patches under noise"
    yield Block(title, pictures=pictures, about="jumps")


@drawing.styled_drawing
def draw_probability_ramp(ramp: Mapping[str, Any]) -> Figure:
    """Draw the probability of the true class over noise; crosses mark changed predictions."""
    figure = drawing.empty_figure(4.8, 3.5, "Example images. Cross: the predicted class changes.")
    axes = figure.subplots()
    for number, curve in enumerate(ramp["shown"]):
        style = drawing.line_look(number) | {"marker": ""}
        axes.plot(ramp["sigmas"], curve["probability"], label=f"image {curve['index']}", **style)
        predicted = np.array(curve["predicted"])
        changed = 1 + (predicted[1:] != predicted[:-1]).nonzero()[0]
        points = (np.array(values)[changed] for values in (ramp["sigmas"], curve["probability"]))
        axes.plot(*points, linestyle="", marker="x", color=style["color"])
    axes.set(xlabel="σ of the noise", title="Prediction along a noise ramp", ylim=(-0.02, 1.02))
    drawing.set_percent_axis(axes, "Probability of the true class")
    drawing.add_legend_below(figure, axes)
    return figure


def draw_noise_overlays(rows: Mapping[float, Overlays]) -> Figure:
    """Draw each patch's expert in the last MoE layer, a row per σ; tinted where it changed."""
    clean = next(iter(rows.values()))
    tiles = []
    for row in rows.values():
        line = []
        for number, image in enumerate(row.images()):
            grid = parse_expert_grid(row.grids[-1][number])
            changed = grid != parse_expert_grid(clean.grids[-1][number])
            texts = np.where(grid < 0, "–", grid.astype(str))
            tint = drawing.patch_expert_colours(np.where(changed, 0, -1), (drawing.PALETTE[1],))
            line.append(drawing.Tile(drawing.displayable_image(image), tint, texts))
        tiles.append(line)
    names = [f"σ = {sigma:g}" if sigma else "clean" for sigma in rows]
    caption = "Last MoE layer. Tinted: another expert."
    title = "Experts under noise: changed ones are tinted"
    return drawing.sheet(tiles, drawing.SheetLabels(title, names, caption=caption), 1.5, 1.5)


PICTURES = Pictures("stability", figures, is_on_page=False, more=ramps_and_patches)

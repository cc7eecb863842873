"""Figures of corruptions and of noise: plain data in, a matplotlib Figure out; no file is written, nothing is kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from moecore.evaluation.overlays import grid_of, pixels_of
from moecore.report.style import PALETTE, legend_of, line_look, new_figure, share_axis, styled

OUTLINE = [withStroke(linewidth=1.6, foreground="#1c2733")]
CHANGED = PALETTE[1]
Rows = Sequence[Mapping[str, Any]]


@styled
def corruption_errors(rows: Rows, title: str = "Error under corruption") -> Figure:
    """Error in percent of each corruption (rows) at each severity (columns); ``rows`` with name, severity and error."""
    names, severities = list(dict.fromkeys(row["name"] for row in rows)), sorted({row["severity"] for row in rows})
    table = np.full((len(names), len(severities)), np.nan)
    for row in rows:
        table[names.index(row["name"]), severities.index(row["severity"])] = row["error"]
    figure = new_figure(2.4 + 0.5 * len(severities), 0.9 + 0.27 * len(names))
    axes = figure.subplots()
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(severities)), severities)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8.5)
    axes.set(xlabel="Severity", title=title)
    for (row, column), error in np.ndenumerate(table):
        axes.text(column, row, f"{error * 100:.0f}", ha="center", va="center", fontsize=8, color="white" if error > 0.55 else "#1c2733")
    return figure


@styled
def corruption_samples(image: np.ndarray, made: Mapping[str, Sequence[np.ndarray]], severities: Sequence[int]) -> Figure:
    """One image (C, H, W) uint8 under each corruption: a column a corruption, the image itself first, a row a severity."""
    figure = new_figure(0.8 * (len(made) + 1) + 0.4, 0.8 * len(severities) + 0.75)
    panels = figure.subplots(len(severities), len(made) + 1, squeeze=False)
    for row, severity in enumerate(severities):
        for axes, shown in zip(panels[row], (image, *(pictures[row] for pictures in made.values())), strict=True):
            _show(axes, shown)
        panels[row][0].set_ylabel(f"{severity}", fontsize=8)
    for axes, name in zip(panels[0], ("clean", *made), strict=True):
        axes.set_title(name.replace("_", "\n", 1), fontsize=7, fontweight="normal", loc="center")
    return figure


@styled
def noise_ramp(sigmas: Sequence[float], shown: Rows, title: str = "Prediction along a noise ramp") -> Figure:
    """The true class's probability of a few images as their noise grows (PRC, figure 1); a cross where the predicted class changes.

    shown: rows with index, probability (S + 1,) and predicted (S + 1,).
    """
    figure = new_figure(4.8, 3.5)
    axes = figure.subplots()
    for number, row in enumerate(shown):
        look = {**line_look(number), "marker": ""}
        axes.plot(sigmas, row["probability"], label=f"image {row['index']}", **look)
        changed = [i for i in range(1, len(sigmas)) if row["predicted"][i] != row["predicted"][i - 1]]
        axes.plot([sigmas[i] for i in changed], [row["probability"][i] for i in changed], linestyle="", marker="x", color=look["color"])
    axes.set(xlabel="σ of the noise", title=title, ylim=(-0.02, 1.02))
    share_axis(axes, "Probability of the true class")
    legend_of(figure, axes, "best")
    return figure


@styled
def noise_overlays(stored: Rows, layer: int = -1, title: str = "Experts under noise: changed ones are tinted") -> Figure:
    """Images with the number of each patch's expert in one MoE layer (PRC, figure 5): a column an image, a row a sigma, clean first.

    stored: rows with sigma and what ``evaluation.overlays`` stores; a patch is tinted where its expert is not that of the first row.
    """
    count = len(pixels_of(stored[0]))
    figure = new_figure(1.5 * count + 0.5, 1.5 * len(stored) + 0.4)
    panels = figure.subplots(len(stored), count, squeeze=False)
    for line, row in zip(panels, stored, strict=True):
        for column, image in enumerate(pixels_of(row)):
            _show(line[column], image)
            grid = grid_of(row["grids"][layer][column])
            _number(line[column], grid, grid != grid_of(stored[0]["grids"][layer][column]), image.shape[-2:])
        line[0].set_ylabel(f"σ = {row['sigma']:g}" if row["sigma"] else "clean")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    """One image (C, H, W) uint8 without ticks; three channels in colour, else the first as grey."""
    axes.imshow(image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])


def _number(axes: Axes, grid: np.ndarray, changed: np.ndarray, size: tuple[int, int]) -> None:
    """Print each patch's expert where the patches are few, and tint the changed ones."""
    height, width = size[0] / grid.shape[0], size[1] / grid.shape[1]
    for (row, column), expert in np.ndenumerate(grid):
        corner = (column * width - 0.5, row * height - 0.5)
        if changed[row, column]:
            axes.add_patch(Rectangle(corner, width, height, facecolor=CHANGED, alpha=0.55, linewidth=0))
        if grid.size <= 100:
            text = "–" if expert < 0 else str(expert)
            axes.text(corner[0] + width / 2, corner[1] + height / 2, text, ha="center", va="center", fontsize=7, color="white", path_effects=OUTLINE)

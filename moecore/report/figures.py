"""All figures of the stages and of the report: plain data in, a matplotlib Figure out; no file is written, nothing is kept."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from moecore.evaluation.classification import Bins
from moecore.evaluation.overlays import grid_of, pixels_of
from moecore.expert_map import map_shape
from moecore.report.style import PALETTE, expert_colours, legend_of, line_look, new_figure, share_axis, styled

OUTLINE = [withStroke(linewidth=1.6, foreground="#1c2733")]
Rows = Sequence[Mapping[str, Any]]


@styled
def training_curves(curves: Mapping[str, Sequence[Rows]]) -> Figure:
    """Loss in training and validation accuracy, or the error of ages, over epochs; ``curves``: label → one curve a seed → rows with epoch and values."""
    figure = new_figure(4.8, 4.8)
    ages = any("validation_mae" in row for seeds in curves.values() for rows in seeds for row in rows)
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    for index, (label, seeds) in enumerate(curves.items()):
        for number, rows in enumerate(seeds):
            look = {**line_look(index), "alpha": 0.9 if number == 0 else 0.45, "label": label if number == 0 else None}
            _plot_known(loss, rows, "train_loss", {**look, "marker": ""})
            _plot_known(accuracy, rows, "validation_mae" if ages else "validation_accuracy", look)
    loss.set(ylabel="Loss in training" if ages else "Cross-entropy in training", title="Training")
    accuracy.set_xlabel("Epoch")
    if ages:
        accuracy.set_ylabel("Validation MAE")
    else:
        share_axis(accuracy, "Validation accuracy")
    legend_of(figure, accuracy, "upper right" if ages else "lower right")
    return figure


@styled
def robustness_curve(curves: Mapping[str, Rows], title: str = "Accuracy under attack", label: str = "Accuracy", whole: bool = True) -> Figure:
    """A share over epsilon with its interval as a band; ``curves``: name → rows with epsilon, value, low, high.

    whole: the axis runs to 100 %; otherwise to the largest value.
    A name without rows has no line but keeps its colour, so that a method looks the same in all figures.
    """
    figure = new_figure(4.8, 3.5)
    axes = figure.subplots()
    for index, (name, rows) in enumerate(curves.items()):
        if not rows:
            continue
        look, epsilons = line_look(index), [row["epsilon"] * 255 for row in rows]
        axes.plot(epsilons, [row["value"] for row in rows], label=name, **look)
        axes.fill_between(epsilons, [row["low"] for row in rows], [row["high"] for row in rows], color=look["color"], alpha=0.13, linewidth=0)
    axes.set(xlabel="ε in 1/255", title=title, ylim=(0, 1.02 if whole else None))
    share_axis(axes, label)
    legend_of(figure, axes, "best")
    return figure


@styled
def reliability_diagram(curves: Mapping[str, Bins], title: str = "Reliability") -> Figure:
    """Accuracy against confidence in bins; the area of a point grows with its images. ``curves``: label → bins."""
    figure = new_figure(4.8, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":", label="calibrated")
    for index, (label, bins) in enumerate(curves.items()):
        filled = [i for i, count in enumerate(bins["count"]) if count]
        x, y = ([bins[name][i] for i in filled] for name in ("confidence", "accuracy"))
        look, total = line_look(index), max(1, sum(bins["count"]))
        axes.plot(x, y, color=look["color"], linestyle=look["linestyle"], linewidth=1.2)
        areas = [14 + 180 * math.sqrt(bins["count"][i] / total) for i in filled]
        axes.scatter(x, y, s=areas, color=look["color"], marker=look["marker"], alpha=0.75, linewidths=0, label=label)
    axes.set(xlabel="Confidence", title=title, xlim=(0, 1.02), ylim=(0, 1.02))
    share_axis(axes, "Accuracy")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend = legend_of(figure, axes, "upper left")
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([30])
    return figure


@styled
def expert_load(layers: Sequence[Sequence[float]], title: str = "Expert load") -> Figure:
    """Share of the choices that each expert of each MoE layer got; ``layers``: (layers, E). The dotted line is balance."""
    figure = new_figure(4.8, 0.5 + 1.2 * len(layers))
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for number, (axes, load) in enumerate(zip(panels, layers, strict=True), start=1):
        axes.bar(range(len(load)), load, color=PALETTE[0], width=0.78)
        axes.axhline(1 / len(load), color=PALETTE[1], linewidth=1.2, linestyle=":")
        axes.grid(axis="x", visible=False)
        axes.set_ylim(bottom=0)
        share_axis(axes, f"MoE {number}")
    panels[0].set_title(title)
    panels[-1].set_xlabel("Expert")
    if len(layers[0]) <= 16:
        panels[-1].set_xticks(range(len(layers[0])))
    return figure


@styled
def confusion_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str], title: str = "Confusion") -> Figure:
    """Share of each true class (rows) that was predicted as each class (columns); ``counts``: (K, K). Numbers up to 20 classes."""
    table = np.asarray(counts, dtype=float)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    figure = new_figure(4.8, 4.7)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    axes.set(xlabel="Predicted", ylabel="True", title=title)
    if len(classes) <= 20:
        axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(len(classes)), classes, fontsize=8)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                axes.text(column, row, f"{share * 100:.0f}", ha="center", va="center", fontsize=7.5, color="white" if share > 0.55 else "#1c2733")
    return figure


@styled
def expert_overlays(stored: Mapping[str, Any], title: str = "") -> Figure:
    """Images with the expert of each patch in colour and number; columns are images, the first row bare, then one row a layer."""
    images, grids = pixels_of(stored), stored["grids"]
    colours = expert_colours(stored["experts"])
    figure = new_figure(1.35 * len(images) + 0.5, 1.4 * (len(grids) + 1) + (0.3 if title else 0))
    panels = figure.subplots(len(grids) + 1, len(images), squeeze=False)
    for column, image in enumerate(images):
        for row in range(len(grids) + 1):
            _show(panels[row][column], image)
            if row:
                _cover(panels[row][column], grid_of(grids[row - 1][column]), image.shape[-2:], colours)
    for row in range(len(grids) + 1):
        panels[row][0].set_ylabel(f"MoE {row}" if row else "Image")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def _plot_known(axes: Axes, rows: Rows, name: str, look: dict[str, Any]) -> None:
    known = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
    axes.plot([epoch for epoch, _ in known], [value for _, value in known], **look)


def _show(axes: Axes, image: np.ndarray) -> None:
    """One image (C, H, W) uint8 without ticks; one channel as grey."""
    axes.imshow(image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])


def _cover(axes: Axes, grid: np.ndarray, size: tuple[int, int], colours: Sequence[str]) -> None:
    """Tint each patch in its expert's colour and print the expert's number; a patch without an expert stays bare."""
    height, width = size[0] / grid.shape[0], size[1] / grid.shape[1]
    for (row, column), expert in np.ndenumerate(grid):
        if expert < 0:
            continue
        corner = (column * width - 0.5, row * height - 0.5)
        axes.add_patch(Rectangle(corner, width, height, facecolor=colours[expert], alpha=0.55, linewidth=0.5, edgecolor="white"))
        if grid.size <= 100:
            middle = (corner[0] + width / 2, corner[1] + height / 2)
            axes.text(*middle, str(expert), ha="center", va="center", fontsize=7, color="white", path_effects=OUTLINE)


@styled
def expert_maps(
    maps: Mapping[str, Sequence[Sequence[float]]], classes: Sequence[str], title: str = "Mean routing of each class", most: int = 12
) -> Figure:
    """Mean probability of each expert on the experts' grid (MoGE, figure 2): a row a model, layer or epoch, a column a class.

    maps: label → (K, E), NaN where a class has no images (its panel stays bare); all with the same E. The first ``most`` classes are shown.
    Each row has one colour scale, from 0 to its largest value.
    """
    rows = {label: np.asarray(values, dtype=float)[:most] for label, values in maps.items()}
    grid = map_shape(next(iter(rows.values())).shape[1])
    names = list(classes)[:most]
    height = min(2.0, max(0.35, grid[0] / grid[1])) * 0.85
    figure = new_figure(0.9 * len(names) + 1.3, (height + 0.12) * len(rows) + 0.75)
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    for line, (label, values) in zip(panels, rows.items(), strict=True):
        _map_row(figure, line, values.reshape(-1, *grid), label)
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name, fontsize=8, fontweight="normal", loc="center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def _map_row(figure: Figure, line: Sequence[Axes], values: np.ndarray, label: str) -> None:
    """One row of heat maps (K, r, c) with a common scale and one colour bar."""
    largest = np.nanmax(values) if np.isfinite(values).any() else 1.0
    for axes, heat in zip(line, values, strict=True):
        shown = axes.imshow(heat, cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    line[0].set_ylabel(label, fontsize=8.5)
    bar = figure.colorbar(shown, ax=list(line), ticks=[0, largest], fraction=0.02, pad=0.01, aspect=12)
    bar.ax.set_yticklabels(["0", f"{largest:.2g}"], fontsize=7.5)
    bar.outline.set_visible(False)

"""The charts that several measurements share: curves with bands, tables in colour."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.measure.values import Value
from moecore.report.column import score_title, unit_suffix
from moecore.report.figures.direct_labels import End, label_ends
from moecore.report.figures.drawing import (
    DARK,
    add_legend_below,
    empty_figure,
    line_look,
    set_percent_axis,
    styled_drawing,
)
from moecore.report.tables.number_format import PIXEL
from moecore.report.typed_results import list_without_none
from moecore.statistics.intervals import Interval, mean_over_seeds
from moecore.tasks.base import Score

Limits = tuple[float, float]  # that a band may not leave
EVERYWHERE = (-np.inf, np.inf)
DIRECT = 8  # curves that have their names at their ends; more have a legend
AROUND = 1.0  # inches of a figure that are not its axes: title, ticks and the axis' name


class Point(NamedTuple):
    """One point of a curve with its band."""

    x: float
    value: float
    low: float
    high: float


Curves = Mapping[str, Sequence[Point]]  # name → points; one without points has no line


class ChartSpec(NamedTuple):
    """The words of a chart, and how its vertical axis is printed."""

    title: str
    x: str
    y: str
    share: bool = False  # the vertical axis is printed as percent
    top: float | None = None  # where it ends
    height: float = 3.5  # inches, of one panel


def point_from_interval(x: float, interval: Interval, limits: Limits = EVERYWHERE) -> Point:
    """A value with its limits, which stay within ``limits``; without limits the band is a line."""
    if interval.limits is None:
        return Point(x, interval.value, interval.value, interval.value)
    low, high = interval.limits
    return Point(x, interval.value, max(limits[0], low), min(limits[1], high))


def points_over_seeds(
    seeds: Sequence[Mapping[float, float | None]], limits: Limits = EVERYWHERE
) -> list[Point]:
    """One point for each x that has a value in all seeds; each seed maps x to a value."""
    points = []
    for x in next(iter(seeds), {}):
        values = list_without_none(of_seed.get(x) for of_seed in seeds)
        if len(values) == len(seeds):
            points.append(point_from_interval(x, mean_over_seeds(values), limits))
    return points


def interval_caption(seeds: Mapping[str, Sequence[object]]) -> str:
    """Return what the bands of ``points_over_seeds`` are, in words; of one seed there are none."""
    if any(len(of_method) > 1 for of_method in seeds.values()):
        return "Bands: 95 % intervals over seeds."
    return "One seed."


def draw_curves(axes: Axes, curves: Curves) -> list[End]:
    """A line and a band each; returns where they end.

    A name without points keeps its colour, so that a method looks the same in all figures.
    """
    ends = []
    for index, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        look = line_look(index)
        places, values, low, high = zip(*points, strict=True)
        axes.plot(places, values, label=name, **look)
        axes.fill_between(places, low, high, color=look["color"], alpha=0.13, linewidth=0)
        ends.append(End(name, places[-1], values[-1], look))
    return ends


def name_curves(figure: Figure, axes: Axes, ends: Sequence[End], height: float) -> None:
    """A name at the end of each curve, or a legend where they are many.

    height: of the axes in inches; what the axes hold is settled.
    """
    if 0 < len(ends) <= DIRECT:
        label_ends(axes, ends, height)
    else:
        add_legend_below(figure, axes)


@styled_drawing
def curves_chart(curves: Curves, look: ChartSpec) -> Figure:
    """All curves in one panel, from 0 upwards, or from below it where a curve goes there."""
    figure = empty_figure(4.8, look.height)
    axes = figure.subplots()
    ends = draw_curves(axes, curves)
    every = [point for points in curves.values() for point in points]
    highest = max((point.high for point in every), default=1.0)
    lowest = min((point.low for point in every), default=0.0)
    top = look.top or 1.05 * highest or 1.0
    axes.set(xlabel=look.x, ylabel=look.y, title=look.title, ylim=(min(0, 1.05 * lowest), top))
    if look.share:
        set_percent_axis(axes, look.y)
    places = {point.x for points in curves.values() for point in points}
    if places and all(float(x).is_integer() for x in places) and len(places) < 12:
        axes.set_xticks(sorted(places))
    name_curves(figure, axes, ends, look.height - AROUND)
    return figure


@styled_drawing
def panels_chart(panels: Mapping[str, Curves], look: ChartSpec) -> Figure:
    """Panels of one scale, up to three beside each other, with one legend below them."""
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = empty_figure(4.8 if across == 1 else 9.8, 0.9 + 2.7 * down)
    figure.suptitle(look.title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    every = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    used = every.flatten()[: len(panels)]
    for axes, (title, curves) in zip(used, panels.items(), strict=True):
        draw_curves(axes, curves)
        axes.set_title(title, fontweight="normal")
    for axes in every.flatten()[len(panels) :]:
        axes.set_visible(False)
    used[0].set_ylim(bottom=0)
    for axes in every[:, 0]:
        axes.set_ylabel(look.y)
        if look.share:
            set_percent_axis(axes, look.y)
    for axes in used[-across:]:  # the lowest of each column
        axes.set_xlabel(look.x)
        axes.tick_params(labelbottom=True)
    add_legend_below(figure, used[0])
    return figure


class Labels(NamedTuple):
    """The words around a table."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    x: str
    y: str = ""
    slanted: bool = False  # the columns' names


@styled_drawing
def draw_heatmap(
    values: np.ndarray,
    texts: np.ndarray,
    labels: Labels,
    size: tuple[float, float],
    caption: str = "",
) -> Figure:
    """A table in colour.

    values: (rows, columns) from 0 to 1, NaN stays bare; texts: of the same shape, "" for none;
    size: width and height in inches.
    """
    figure = empty_figure(*size, caption)
    axes = figure.subplots()
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set(xlabel=labels.x, ylabel=labels.y, title=labels.title)
    turned: dict[str, Any] = {}
    if labels.slanted:
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels.columns)), labels.columns, fontsize=8, **turned)
    axes.set_yticks(range(len(labels.rows)), labels.rows, fontsize=8)
    for (row, column), text in np.ndenumerate(texts):
        if text:
            # Clipped text takes no part in the layout, which would measure every number.
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if values[row, column] > 0.55 else DARK,
                clip_on=True,
            )
    return figure


def percent_annotations(values: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Shares as text, 0.123 → 12; "" where there is none, or less than ``least``."""
    texts = np.char.mod("%.0f", 100 * values)
    return np.where(values >= least, texts, "")


def draw_score_over_epsilon(curves: Curves, what: str, score: Score) -> Figure:
    title = score_title(score)
    look = ChartSpec(f"Error under {what}", f"ε in 1/{PIXEL}", title + unit_suffix(score))
    if score.form == "share":
        look = look._replace(title=f"{title} under {what}", share=True, top=1.02)
    return curves_chart(curves, look)


def attack_points(seeds: Sequence[Sequence[Value]], score: Score) -> list[Point]:
    """One point per epsilon: means over seeds, or one seed's own interval; seeds: values each."""
    limits = {"share": (0.0, 1.0)}.get(score.form, (0.0, np.inf))
    points = []
    for values in zip(*seeds, strict=True):
        interval = values[0].interval
        if len(values) > 1:
            interval = mean_over_seeds([one.value for one in values])
        epsilon = float(values[0].at["epsilon"])
        points.append(point_from_interval(epsilon * PIXEL, interval, limits))
    return points

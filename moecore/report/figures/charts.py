"""Charts that several measurements share: curves with bands, and heatmaps."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import scipy

from moecore.measure.values import Value
from moecore.report.column import score_title, unit_suffix
from moecore.report.figures import drawing
from moecore.report.figures.drawing import Axes, Bbox, Figure, Line2D
from moecore.report.result_types import list_without_none
from moecore.report.tables.cells import PIXEL
from moecore.statistics.intervals import Interval, mean_over_seeds
from moecore.tasks.base import Score

Limits = tuple[float, float]  # bands are clipped to them
Series = Mapping[float, float | None]  # x → value
NO_LIMITS = (-np.inf, np.inf)
MAX_ANNOTATED_COLUMNS = 20  # a square heatmap with more columns has no numbers
MAX_DIRECT_LABELS = 8  # curves labelled at their ends; for more curves there is a legend
AXES_MARGIN = 1.0  # inches of a figure's height for the title, ticks and axis label
FONT_SIZE = 9.0
NAME_SPACING = 0.165  # inches between the baselines of adjacent names
# Candidate directions (x, y) of a name from its point, in order of preference; up is positive.
LABEL_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
LABEL_DISTANCES = (7, 14, 24, 38, 55, 75)  # pixels between a point and its name, nearest first


class CurveEnd(NamedTuple):
    """The last point of a curve, with the curve's name and line style."""

    name: str
    x: float
    y: float
    style: Mapping[str, object]


class CurvePoint(NamedTuple):
    x: float
    value: float
    low: float
    high: float


Curves = Mapping[str, Sequence[CurvePoint]]  # name → points; () draws no line


class ChartSpec(NamedTuple):
    title: str
    x: str
    y: str
    share: bool = False  # the vertical axis is printed as percent
    top: float | None = None  # upper limit of the vertical axis
    height: float = 3.5  # inches, of one panel


def point_from_interval(x: float, interval: Interval, limits: Limits = NO_LIMITS) -> CurvePoint:
    """Return a point whose band is the interval, cut to ``limits``; no interval: no band."""
    if interval.limits is None:
        return CurvePoint(x, interval.value, interval.value, interval.value)
    low, high = interval.limits
    return CurvePoint(x, interval.value, max(limits[0], low), min(limits[1], high))


def points_over_seeds(seeds: Sequence[Series], limits: Limits = NO_LIMITS) -> list[CurvePoint]:
    """Return the mean over seeds with its interval, for each x that all seeds have."""
    points = []
    for x in next(iter(seeds), {}):
        values = list_without_none(of_seed.get(x) for of_seed in seeds)
        if len(values) == len(seeds):
            points.append(point_from_interval(x, mean_over_seeds(values), limits))
    return points


def interval_caption(seeds: Mapping[str, Sequence[object]]) -> str:
    """Return the caption's sentence on bands: intervals over seeds, or of one seed."""
    if any(len(of_method) > 1 for of_method in seeds.values()):
        return "Bands: 95 % intervals over seeds."
    return "One seed."


def draw_curves(axes: Axes, curves: Curves) -> list[CurveEnd]:
    """Draw each curve as a line with a band; return the last point of each."""
    ends = []
    for index, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        style = drawing.line_style(index)
        places, values, low, high = zip(*points, strict=True)
        axes.plot(places, values, label=name, **style)
        axes.fill_between(places, low, high, color=style["color"], alpha=0.13, linewidth=0)
        ends.append(CurveEnd(name, places[-1], values[-1], style))
    return ends


def label_curves(figure: Figure, axes: Axes, ends: Sequence[CurveEnd], height: float) -> None:
    """Label the curves at their ends, or in a legend if there are many; height: of axes, inches."""
    if 0 < len(ends) <= MAX_DIRECT_LABELS:
        label_curve_ends(axes, ends, height)
    else:
        drawing.add_legend_below(figure, axes)


@drawing.styled_drawing
def curves_chart(curves: Curves, spec: ChartSpec) -> Figure:
    """Return a figure of one panel with all curves and bands; its vertical axis includes 0."""
    figure = drawing.create_figure(4.8, spec.height)
    axes = figure.subplots()
    ends = draw_curves(axes, curves)
    all_points = [point for points in curves.values() for point in points]
    highest = max((point.high for point in all_points), default=1.0)
    lowest = min((point.low for point in all_points), default=0.0)
    top = spec.top or 1.05 * highest or 1.0
    axes.set(xlabel=spec.x, ylabel=spec.y, title=spec.title, ylim=(min(0, 1.05 * lowest), top))
    if spec.share:
        drawing.set_percent_axis(axes, spec.y)
    places = {point.x for points in curves.values() for point in points}
    if places and all(float(x).is_integer() for x in places) and len(places) < 12:
        axes.set_xticks(sorted(places))
    label_curves(figure, axes, ends, spec.height - AXES_MARGIN)
    return figure


@drawing.styled_drawing
def panels_chart(panels: Mapping[str, Curves], spec: ChartSpec) -> Figure:
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = drawing.create_figure(4.8 if across == 1 else 9.8, 0.9 + 2.7 * down)
    figure.suptitle(spec.title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    all_axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    used = all_axes.flatten()[: len(panels)]
    for axes, (title, curves) in zip(used, panels.items(), strict=True):
        draw_curves(axes, curves)
        axes.set_title(title, fontweight="normal")
    for axes in all_axes.flatten()[len(panels) :]:
        axes.set_visible(False)
    used[0].set_ylim(bottom=0)
    for axes in all_axes[:, 0]:
        axes.set_ylabel(spec.y)
        if spec.share:
            drawing.set_percent_axis(axes, spec.y)
    for axes in used[-across:]:  # the lowest of each column
        axes.set_xlabel(spec.x)
        axes.tick_params(labelbottom=True)
    drawing.add_legend_below(figure, used[0])
    return figure


class HeatmapLabels(NamedTuple):
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    x: str
    y: str = ""
    slanted: bool = False  # the columns' names


@drawing.styled_drawing
def draw_heatmap(
    values: np.ndarray,  # (rows, columns) from 0 to 1, NaN has no colour
    texts: np.ndarray,  # "" for none
    labels: HeatmapLabels,
    size: tuple[float, float],  # width and height in inches
    caption: str = "",
) -> Figure:
    figure = drawing.create_figure(*size, caption)
    axes = figure.subplots()
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set(xlabel=labels.x, ylabel=labels.y, title=labels.title)
    style: dict[str, Any] = {"fontsize": 8}
    if labels.slanted:
        style |= {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels.columns)), labels.columns, **style)
    axes.set_yticks(range(len(labels.rows)), labels.rows, fontsize=8)
    # Clipped text takes no part in the layout, which would measure every number.
    style = {"ha": "center", "va": "center", "fontsize": 7.5, "clip_on": True}
    for (row, column), text in np.ndenumerate(texts):
        if text:
            colour = "white" if values[row, column] > 0.55 else drawing.DARK
            axes.text(column, row, text, color=colour, **style)
    return figure


def percent_annotations(table: np.ndarray, minimum: float = 0, limit: float = np.inf) -> np.ndarray:
    """Return shares in percent, "12" for 0.123; "" if NaN, < ``minimum`` or > ``limit`` columns."""
    # limit: maximum number of columns; numbers in a wider table would not fit, so all are "".
    is_shown = (table >= minimum) & (table.shape[1] <= limit)
    return np.where(is_shown, np.char.mod("%.0f", 100 * table), "")


def draw_score_over_epsilon(curves: Curves, what: str, score: Score) -> Figure:
    title = score_title(score)
    spec = ChartSpec(f"Error under {what}", f"ε in 1/{PIXEL}", title + unit_suffix(score))
    if score.form == "share":
        spec = spec._replace(title=f"{title} under {what}", share=True, top=1.02)
    return curves_chart(curves, spec)


def attack_points(seeds: Sequence[Sequence[Value]], score: Score) -> list[CurvePoint]:
    """Return a point per epsilon of one attack: mean over seeds, or one seed's value."""
    limits = {"share": (0.0, 1.0)}.get(score.form, (0.0, np.inf))
    points = []
    for values in zip(*seeds, strict=True):
        epsilon = float(values[0].at["epsilon"])
        points.append(point_from_interval(epsilon * PIXEL, interval_over_seeds(values), limits))
    return points


def interval_over_seeds(values: Sequence[Value]) -> Interval:
    if len(values) == 1:
        return values[0].interval
    return mean_over_seeds([value.value for value in values])


def label_curve_ends(axes: Axes, ends: Sequence[CurveEnd], height: float) -> None:
    """Write each name right of the axes, with a line to its curve; height: of axes, inches."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end.y)
    heights = [(end.y - low) / (high - low) for end in ends]
    right = axes.get_xlim()[1]
    line = {"arrowstyle": "-", "linewidth": 0.9, "shrinkA": 1, "shrinkB": 2, "alpha": 0.9}
    style: dict[str, Any] = {"textcoords": "axes fraction", "va": "center", "fontsize": FONT_SIZE}
    for end, place in zip(ends, spread_label_heights(heights, NAME_SPACING / height), strict=True):
        style |= {"annotation_clip": False, "arrowprops": line | {"color": end.style["color"]}}
        axes.annotate(end.name, (end.x, end.y), (1.06, place), **style)
    axes.set_xlim(right=right)


def spread_label_heights(heights: Sequence[float], distance: float) -> np.ndarray:
    """Return ascending heights in [0, 1], moved as little as possible to be ``distance`` apart."""
    steps = distance * np.arange(len(heights))
    return np.clip(scipy.optimize.isotonic_regression(heights - steps).x, 0, 1 - steps[-1]) + steps


def label_points(
    figure: Figure, axes: Axes, points: Mapping[str, tuple[float, float]], lines: Sequence[Line2D]
) -> None:
    """Write a name near each point without covering other names, points or lines."""
    # points: name → position in the data; lines: whiskers, and points without names. This computes
    # the layout of the figure.
    from matplotlib.transforms import Bbox

    drawing.freeze_layout(figure)
    frame = axes.get_window_extent()
    dots = {name: axes.transData.transform(place) for name, place in points.items()}
    obstacles = [(line.get_window_extent().padded(1), 3) for line in lines]  # box and weight
    obstacles += [(Bbox.from_bounds(x - 6, y - 6, 12, 12), 10) for x, y in dots.values()]
    arrow = {"arrowstyle": "-", "color": drawing.INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
    style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": FONT_SIZE}
    for name, dot in sorted(dots.items(), key=lambda pair: -pair[1][1]):
        size = _measure_text_size(figure, name)
        places = []
        for reach, side in product(LABEL_DISTANCES, LABEL_DIRECTIONS):
            middle = dot + np.array(side) * (reach + size / 2)
            places.append((reach, Bbox([middle - size / 2, middle + size / 2])))
        reach, box = min(places, key=lambda place: _box_cost(*place, obstacles, frame))
        obstacles.append((box, 10))
        line = arrow if reach > LABEL_DISTANCES[1] else None
        right, up = (box.get_points().mean(axis=0) - dot) * 72 / figure.dpi
        axes.annotate(name, points[name], (right, up), arrowprops=line, **style)


def _box_cost(reach: float, box: Bbox, obstacles: Sequence[tuple[Bbox, int]], frame: Bbox) -> float:
    """Sum area outside ``frame``, weighted overlaps and ``reach``, a name's distance to its dot."""
    outside = box.width * box.height - _overlap(box, frame)
    return 20 * outside + sum(weight * _overlap(box, other) for other, weight in obstacles) + reach


def _overlap(first: Bbox, second: Bbox) -> float:
    overlap = first.intersection(first, second)
    return 0.0 if overlap is None else overlap.width * overlap.height


def _measure_text_size(figure: Figure, name: str) -> np.ndarray:
    text = figure.text(0, 0, name, fontsize=FONT_SIZE)
    box = text.get_window_extent()
    text.remove()
    return np.array([box.width + 4, box.height + 2])

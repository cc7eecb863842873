"""Overview figures of a phase: its methods' score, robustness and cost; samples of its data."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moecore.data.prepared import Prepared
from moecore.report.column import CEILING, DENSE
from moecore.report.figures import drawing
from moecore.report.figures.charts import Limits, label_points
from moecore.report.headline_quantities import PANEL_TITLES, PhaseQuantities, QuantityByMethod
from moecore.report.page.page_objects import Picture
from moecore.report.result_types import PhaseResults
from moecore.report.tables.cells import NumberFormat
from moecore.statistics.intervals import Interval

MAX_NAMED_POINTS = 12  # with more points, only floor, ceiling and the best are named
BEST_NAMED = 3  # per axis, if there are more than MAX_NAMED_POINTS
TITLE_LETTERS = 18  # per line of a panel's title
ERROR_COLUMNS = ("test_nats", "test_mae")
FAR_FROM_ZERO = 0.8  # an error axis does not start at 0 if smallest / largest exceeds this
RELATIVE_MARGIN = 0.12  # of an axis' data range, added on both sides
BEST_CORNER = {"higher": "upper right", "lower": "lower left"}
Looks = Mapping[str, Mapping[str, Any]]
MAX_SAMPLED_CLASSES = 20
PLANES = ("sagittal", "coronal", "axial")  # across the axes right, anterior, superior


def draw_overview(phase: PhaseResults, quantities: PhaseQuantities) -> Iterator[Picture]:
    """Yield two pictures: score with and without attack; cost, and routing overlap under change."""
    looks = {
        method: {key: drawing.line_style(number)[key] for key in ("color", "marker")}
        for number, method in enumerate(phase.models)
    }
    bounds = ""
    if quantities.score is not None and quantities.score.floor_and_ceiling:
        bounds = f"Dashed: without routing ({DENSE}), and routed by the truth ({CEILING}). "
    rest = [quantities.steady, quantities.cost]
    if quantities.score is not None and quantities.attacked is not None:
        corner = BEST_CORNER[quantities.score.column.better]
        chart = draw_clean_against_attacked(quantities.score, quantities.attacked, looks)
        caption = f"{bounds}The best place is the {corner} corner. Lines: 95\u00a0% intervals."
        if len(looks) > MAX_NAMED_POINTS:
            caption += " Named: floor, ceiling and the best; the next picture names all marks."
        yield Picture(chart, f"{phase.name}: overview of scores", caption)
        bounds = ""
    else:
        rest.insert(0, quantities.score)
    shown = [quantity for quantity in rest if quantity is not None]
    if not shown:
        return
    caption = "One seed: no intervals."
    if any(cell.kind for quantity in shown for cell in quantity.cells.values()):
        caption = "Lines: 95\u00a0% intervals."
    if quantities.steady is not None and quantities.steady.remains:
        overlap = "Overlap: IoU of the experts that a token is sent to, with and without."
        caption = f"{overlap} {caption}"
    label = f"{phase.name}: overview of routing and cost"
    yield Picture(draw_quantity_panels(shown, looks), label, bounds + caption)


@drawing.styled_drawing
def draw_clean_against_attacked(
    score: QuantityByMethod, attacked: QuantityByMethod, looks: Looks
) -> Figure:
    form = score.column.form
    figure = drawing.create_figure(5.0, 4.3)
    axes = figure.subplots()
    points, lines = {}, []
    named = methods_to_label(score, attacked)
    for method in score.cells:
        if method not in attacked.cells:
            continue
        x = score.interval(method)
        y = attacked.interval(method)
        if method not in named:
            lines += axes.plot(x.value, y.value, linestyle="", markersize=5, **looks[method])
            continue
        points[method] = (x.value, y.value)
        thin = {"color": looks[method]["color"], "linewidth": 0.9, "alpha": 0.6}
        lines += axes.plot(limits_or_value(x), [y.value] * 2, **thin)
        lines += axes.plot([x.value] * 2, limits_or_value(y), **thin)
        axes.plot(x.value, y.value, linestyle="", markersize=8, **looks[method])
    draw_floor_and_ceiling(axes, score)
    axes.set_xlim(axis_limits_with_margin([x for line in lines for x in line.get_xdata()], form))
    axes.set_ylim(axis_limits_with_margin([y for line in lines for y in line.get_ydata()], form))
    axes.set(title="Clean and under attack", xlabel=score.column.label)
    axes.set_ylabel(attacked.column.label)
    if form == "share":
        drawing.set_percent_axis(axes, attacked.column.label)
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
        axes.xaxis.set_major_locator(MaxNLocator(6))  # labels such as 88.25% do not touch
    label_points(figure, axes, points, lines)
    return figure


@drawing.styled_drawing
def draw_quantity_panels(quantities: Sequence[QuantityByMethod], looks: Looks) -> Figure:
    """Draw one panel per quantity, with one row per method: its value and interval."""
    methods = [name for name in looks if any(name in quantity.cells for quantity in quantities)]
    width = max(5.0, 1.4 + 1.55 * len(quantities))  # titles do not touch
    figure = drawing.create_figure(width, max(4.3, 1.3 + 0.37 * len(methods)))
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        ends = [0.0]
        for place, method in enumerate(methods):
            if method not in quantity.cells:
                across = axes.get_yaxis_transform()
                axes.text(0.04, place, "none", fontsize=8, va="center", transform=across)
                continue
            interval = _rescale(quantity, method)
            thin = {"color": looks[method]["color"], "linewidth": 0.9, "alpha": 0.6}
            axes.plot(limits_or_value(interval), [place] * 2, **thin)
            look = looks[method]
            axes.plot(interval.value, place, linestyle="", markersize=8, clip_on=False, **look)
            ends += limits_or_value(interval)
        draw_floor_and_ceiling(axes, quantity)
        axes.set_title(panel_title(quantity), fontsize=8.5 if len(quantities) > 2 else 9.5)
        column = quantity.column
        near = [end for end in ends if end]
        is_far = column.name in ERROR_COLUMNS and near and min(near) > FAR_FROM_ZERO * max(near)
        if quantity.floor_and_ceiling or is_far:  # from zero, differences could not be seen
            axes.set_xlim(axis_limits_with_margin(near, column.form))
        else:
            axes.set_xlim(axis_limits_with_margin(ends, column.form, from_zero=True))
        annotate_values(axes, quantity, methods)
        axes.xaxis.set_major_locator(MaxNLocator(3))  # labels such as 98.75% do not touch
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        if quantity.column.form == "share":
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.tick_params(axis="x", labelsize=8.5)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def draw_floor_and_ceiling(axes: Axes, score: QuantityByMethod) -> None:
    for interval in score.floor_and_ceiling.values():
        axes.axvline(interval.value, color=drawing.GUIDE, linewidth=1, linestyle="--", zorder=1)


def methods_to_label(*quantities: QuantityByMethod) -> set[str]:
    """Return the methods to label: all if few, else dense, told (true routing) and the best."""
    named = set().union(*(quantity.cells for quantity in quantities))
    if len(named) <= MAX_NAMED_POINTS:
        return named
    named = {DENSE, CEILING}
    for quantity in quantities:
        values = {method: quantity.interval(method).value for method in quantity.cells}
        is_higher_better = quantity.column.better == "higher"
        named.update(sorted(values, key=values.__getitem__, reverse=is_higher_better)[:BEST_NAMED])
    return named


def annotate_values(axes: Axes, quantity: QuantityByMethod, methods: Sequence[str]) -> None:
    middle = sum(axes.get_xlim()) / 2
    scaled = NumberFormat.of("number", [_rescale(quantity, method) for method in quantity.cells])
    for place, method in enumerate(methods):
        if method in quantity.cells:
            value = _rescale(quantity, method).value
            text = f"{value:,.{scaled.places}f}"
            if quantity.column.form == "share":
                text = quantity.format.value(value)
            side, shift = ("right", 4) if value > middle else ("left", -4)
            if method in quantity.floor_and_ceiling:  # on the other side of its line
                shift = -shift
            style = {"ha": side, "va": "bottom", "fontsize": 8, "textcoords": "offset points"}
            axes.annotate(text, (value, place), (shift, 7), **style)


def panel_title(quantity: QuantityByMethod) -> str:
    """Return a short title of the quantity, in lines of about ``TITLE_LETTERS`` letters."""
    name = quantity.column.name
    titles = (title for start, title in PANEL_TITLES.items() if name.startswith(start))
    return next(titles, fill(quantity.column.label, TITLE_LETTERS))


def axis_limits_with_margin(ends: Sequence[float], form: str, from_zero: bool = False) -> Limits:
    """Return the axis limits: the range of ``ends`` plus a margin; shares stay near [0, 1]."""
    low, high = min(ends), max(ends)
    margin = RELATIVE_MARGIN * ((high - low) or abs(high) or 1.0)
    first = low if from_zero and low >= 0 else low - margin
    if form != "share":
        return first, high + margin
    return max(first, -0.02), 1.03 if from_zero else min(high + margin, 1.03)


def limits_or_value(interval: Interval) -> Limits:
    return interval.limits or (interval.value, interval.value)


def _rescale(quantity: QuantityByMethod, method: str) -> Interval:
    """Return a method's interval in the panel's unit: parameters and FLOPs in millions."""
    interval = quantity.interval(method)
    scale = {"active_parameters": 1e-6, "gflops": 1e3}.get(quantity.column.name, 1.0)
    return Interval(interval.value * scale, *(limit * scale for limit in interval.limits or ()))


def draw_dataset_samples(prepared: Prepared, shots: int = 10) -> Figure:
    """Draw ``shots`` training images per class: one row per class, MAX_SAMPLED_CLASSES or fewer."""
    # For volumes: the middle slices of ``shots``, from young to old, one row per plane. For labels
    # that are not classes: one row of the first images.
    images = prepared.train.images
    by_class = prepared.task.by_class(torch.from_numpy(prepared.train.labels))
    if by_class is None and images.ndim == 5:
        return draw_volume_montage(prepared, shots)
    rows = {prepared.card["name"]: list(range(min(shots, len(images))))}
    if by_class is not None:
        indices, classes = by_class
        names = prepared.task.classes[:MAX_SAMPLED_CLASSES]
        rows = {name: indices[classes == row].tolist() for row, name in enumerate(names)}
    figure = Figure(figsize=(0.6 * shots + 1.6, 0.6 * len(rows) + 0.4), layout="constrained")
    panels = _bare_axes(figure, len(rows), shots)
    for line, (name, places) in zip(panels, rows.items(), strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, index in zip(line, places[:shots], strict=False):
            axis.imshow(drawing.displayable_image(images[index]), cmap="gray", vmin=0, vmax=255)
    return figure


def draw_volume_montage(prepared: Prepared, shots: int) -> Figure:
    """Draw middle slices of ``shots`` training volumes, sorted by age; * marks quality flags."""
    volumes = prepared.train.images
    ages = prepared.train.labels
    subjects = prepared.subjects("train")
    unit = prepared.card["task"]["unit"]
    order = np.argsort(ages, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(shots, len(order))).astype(int))]
    figure = Figure(figsize=(1.3 * len(chosen) + 0.9, 4.6), layout="constrained")
    axes = _bare_axes(figure, len(PLANES), len(chosen))
    for column, index in enumerate(chosen):
        flags = " *" if subjects[index]["qc_flags"] else ""
        title = f"{ages[index]:.1f} {unit}, {subjects[index]['sex'] or '?'}{flags}"
        axes[0, column].set_title(title, fontsize=7)
        for axis, picture in zip(axes[:, column], middle_slices(volumes[index, 0]), strict=True):
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
    for axis, plane in zip(axes[:, 0], PLANES, strict=True):
        axis.set_ylabel(plane, fontsize=8)
    simulated = "simulated, " if prepared.card["simulated"] else ""
    title = f"{prepared.card['name']} ({simulated}{len(ages)} training volumes)"
    figure.suptitle(title, fontsize=9)
    return figure


def middle_slices(volume: np.ndarray) -> list[np.ndarray]:
    """Return the middle slice across each axis of a volume (D, H, W) in RAS order, fp32."""
    volume = volume.astype(np.float32)
    return [volume.take(length // 2, axis).T[::-1] for axis, length in enumerate(volume.shape)]


def _bare_axes(figure: Figure, rows: int, columns: int) -> np.ndarray:
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    return axes

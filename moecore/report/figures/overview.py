"""The methods of a phase in a picture: score, score under attack, steadiness of routing, cost."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moecore.report.column import CEILING, DENSE
from moecore.report.figures import drawing
from moecore.report.figures.charts import label_points
from moecore.report.headline_quantities import PANELS, PhaseQuantities, QuantityByMethod
from moecore.report.page.page_objects import Picture
from moecore.report.study_results import Phase
from moecore.report.tables.cells import NumberFormat
from moecore.statistics.intervals import Interval

NAMED = 12  # points that all have their names; of more only floor, ceiling and the best have them
FEW = 3  # best points of each axis that are then named
WIDE = 18  # letters of a panel's title in one line
ERRORS = ("test_nats", "test_mae")
FAR = 0.8  # of its largest value: a panel whose smallest is above does not begin at zero
ROOM = 0.12  # of what an axis holds, beyond it on both sides
BEST = {"higher": "upper right", "lower": "lower left"}
Looks = Mapping[str, Mapping[str, Any]]


def overview_charts(phase: Phase, quantities: PhaseQuantities) -> Iterator[Picture]:
    """Yield pictures: score against score under attack; then steadiness and cost per method."""
    looks = {
        method: {key: drawing.line_look(number)[key] for key in ("color", "marker")}
        for number, method in enumerate(phase.models)
    }
    bounds = ""
    if quantities.score is not None and quantities.score.floor_and_ceiling:
        bounds = f"Dashed: without routing ({DENSE}), and routed by the truth ({CEILING}). "
    rest = [quantities.steady, quantities.cost]
    if quantities.score is not None and quantities.attacked is not None:
        corner = BEST[quantities.score.column.better]
        named = " Named: floor, ceiling and the best; the next picture names all marks."
        yield Picture(
            draw_clean_against_attacked(quantities.score, quantities.attacked, looks),
            f"{phase.name}: overview of scores",
            f"{bounds}The best place is the {corner} corner. Lines: 95\u00a0% intervals."
            + (named if len(looks) > NAMED else ""),
        )
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
    yield Picture(draw_method_rows(shown, looks), label, bounds + caption)


@drawing.styled_drawing
def draw_clean_against_attacked(
    score: QuantityByMethod, attacked: QuantityByMethod, looks: Looks
) -> Figure:
    """Draw a point per method: score against score under attack; named points have whiskers."""
    form = score.column.form
    figure = drawing.empty_figure(5.0, 4.3)
    axes = figure.subplots()
    points = {}
    lines = []
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
    axes.set_xlim(limits_with_margin([x for line in lines for x in line.get_xdata()], form))
    axes.set_ylim(limits_with_margin([y for line in lines for y in line.get_ydata()], form))
    axes.set(title="Clean and under attack", xlabel=score.column.label)
    axes.set_ylabel(attacked.column.label)
    if form == "share":
        drawing.set_percent_axis(axes, attacked.column.label)
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
    label_points(figure, axes, points, lines)
    return figure


@drawing.styled_drawing
def draw_method_rows(quantities: Sequence[QuantityByMethod], looks: Looks) -> Figure:
    """Draw a panel per quantity with a row per method: its value with a whisker, or "none"."""
    methods = [name for name in looks if any(name in quantity.cells for quantity in quantities)]
    width = max(5.0, 1.4 + 1.55 * len(quantities))  # titles do not touch
    figure = drawing.empty_figure(width, max(4.3, 1.3 + 0.37 * len(methods)))
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        ends = [0.0]
        for place, method in enumerate(methods):
            if method not in quantity.cells:
                across = axes.get_yaxis_transform()
                axes.text(0.04, place, "none", fontsize=8, va="center", transform=across)
                continue
            interval = _scaled(quantity, method)
            thin = {"color": looks[method]["color"], "linewidth": 0.9, "alpha": 0.6}
            axes.plot(limits_or_value(interval), [place] * 2, **thin)
            axes.plot(interval.value, place, linestyle="", markersize=8, **looks[method])
            ends += limits_or_value(interval)
        draw_floor_and_ceiling(axes, quantity)
        axes.set_title(panel_title(quantity), fontsize=8.5 if len(quantities) > 2 else 9.5)
        column = quantity.column
        near = [end for end in ends if end]
        is_far = column.name in ERRORS and near and min(near) > FAR * max(near)
        if quantity.floor_and_ceiling or is_far:  # from zero, differences could not be seen
            axes.set_xlim(limits_with_margin(near, column.form))
        else:
            axes.set_xlim(limits_with_margin(ends, column.form, from_zero=True))
        print_values(axes, quantity, methods)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        if quantity.column.form == "share":
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.tick_params(axis="x", labelsize=8.5)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def draw_floor_and_ceiling(axes: Axes, score: QuantityByMethod) -> None:
    """Draw dashed lines at the scores of dense and told, if both were trained."""
    for interval in score.floor_and_ceiling.values():
        axes.axvline(interval.value, color=drawing.GUIDE, linewidth=1, linestyle="--", zorder=1)


def methods_to_label(*quantities: QuantityByMethod) -> set[str]:
    """Return the methods whose points get a name: all if few, else dense, told and the best."""
    named = set().union(*(quantity.cells for quantity in quantities))
    if len(named) <= NAMED:
        return named
    named = {DENSE, CEILING}
    for quantity in quantities:
        values = {method: quantity.interval(method).value for method in quantity.cells}
        is_higher_better = quantity.column.better == "higher"
        named.update(sorted(values, key=values.__getitem__, reverse=is_higher_better)[:FEW])
    return named


def print_values(axes: Axes, quantity: QuantityByMethod, methods: Sequence[str]) -> None:
    """Print each method's value above its point, on the side with more room."""
    middle = sum(axes.get_xlim()) / 2
    scaled = NumberFormat.of("number", [_scaled(quantity, method) for method in quantity.cells])
    for place, method in enumerate(methods):
        if method in quantity.cells:
            value = _scaled(quantity, method).value
            text = f"{value:,.{scaled.places}f}"
            if quantity.column.form == "share":
                text = quantity.format.value(value)
            side, shift = ("right", 4) if value > middle else ("left", -4)
            if method in quantity.floor_and_ceiling:  # on the other side of its line
                shift = -shift
            style = {"ha": side, "va": "bottom", "fontsize": 8, "textcoords": "offset points"}
            axes.annotate(text, (value, place), (shift, 7), **style)


def panel_title(quantity: QuantityByMethod) -> str:
    """Return a quantity's title for a narrow panel, in lines of at most about ``WIDE`` letters."""
    name = quantity.column.name
    if name.startswith("routing_change"):
        return "Routing: overlap\nunder attack"
    if name.startswith("swapped_change"):
        return "Routing: overlap,\nwords swapped"
    return PANELS.get(name) or fill(quantity.column.label, WIDE)


def limits_with_margin(
    ends: Sequence[float], form: str, from_zero: bool = False
) -> tuple[float, float]:
    """Return an axis' limits: ``ends`` with a margin, for shares at most just beyond 0 and 1."""
    low, high = min(ends), max(ends)
    margin = ROOM * ((high - low) or abs(high) or 1.0)
    first = low if from_zero and low >= 0 else low - margin
    if form != "share":
        return first, high + margin
    return max(first, -0.02), 1.03 if from_zero else min(high + margin, 1.03)


def limits_or_value(interval: Interval) -> tuple[float, float]:
    """Return the interval's limits, or its value twice if it has none."""
    return interval.limits or (interval.value, interval.value)


def _scaled(quantity: QuantityByMethod, method: str) -> Interval:
    """Return a method's interval in the unit drawn: parameters and FLOPs in millions."""
    interval = quantity.interval(method)
    scale = {"active_parameters": 1e-6, "gflops": 1e3}.get(quantity.column.name, 1.0)
    return Interval(interval.value * scale, *(limit * scale for limit in interval.limits or ()))

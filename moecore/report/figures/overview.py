"""The methods of a phase in a picture: score, score under attack, steadiness of routing, cost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from moecore.report.figures.direct_labels import label_points
from moecore.report.figures.drawing import line_look, new_figure, share_axis, styled
from moecore.report.measured import Phase
from moecore.report.page.view import Picture
from moecore.report.quantities import PANELS, Quantities, Quantity
from moecore.report.tables.number_format import NumberFormat
from moecore.statistics.intervals import Interval

NAMED = 12  # points that have their names; more have numbers, which stand with the names of rows
WIDE = 18  # letters of a panel's title in one line
ERRORS = ("test_nats", "test_mae")
FAR = 0.8  # of its largest value: a panel whose smallest is above does not begin at zero
ROOM = 0.12  # of what an axis holds, beyond it on both sides
BEST = {"higher": "upper right", "lower": "lower left"}
Looks = Mapping[str, Mapping[str, Any]]
Line = tuple[list[float], list[float]]


def overview_pictures(phase: Phase, quantities: Quantities) -> Iterator[Picture]:
    """Score against score under attack, then steadiness and cost method by method."""
    looks = {}
    for number, method in enumerate(phase.models):
        look = line_look(number)
        looks[method] = {"color": look["color"], "marker": look["marker"]}
    rest = [quantities.steady, quantities.cost]
    if quantities.score is not None and quantities.attacked is not None:
        corner = BEST[quantities.score.column.better]
        yield Picture(
            draw_scatter(quantities.score, quantities.attacked, looks),
            f"{phase.name}: overview of scores",
            f"The best place is the {corner} corner. Lines: 95\u00a0% intervals."
            + (" Numbers: the methods beside." if len(looks) > NAMED else ""),
        )
    else:
        rest.insert(0, quantities.score)
    shown = [quantity for quantity in rest if quantity is not None]
    if shown:
        intervals = any(cell.kind for quantity in shown for cell in quantity.cells.values())
        yield Picture(
            draw_method_rows(shown, looks),
            f"{phase.name}: overview of routing and cost",
            overlap_caption(quantities, intervals),
        )


def overlap_caption(quantities: Quantities, intervals: bool) -> str:
    """What the overlap is of, and what the lines are."""
    words = ["Lines: 95\u00a0% intervals." if intervals else "One seed: no intervals."]
    if quantities.steady is not None and quantities.steady.remains:
        words.insert(0, "Overlap: IoU of the experts that a token is sent to, with and without.")
    return " ".join(words)


@styled
def draw_scatter(score: Quantity, attacked: Quantity, looks: Looks) -> Figure:
    """A point per method with its name, and thin whiskers."""
    figure = new_figure(5.0, 4.3)
    axes = figure.subplots()
    points = {}
    whiskers = []
    names = names_of(list(looks))
    for method in score.cells:
        if method not in attacked.cells:
            continue
        x = score.interval(method)
        y = attacked.interval(method)
        points[names[method][0]] = (x.value, y.value)
        for line in (_line(x, y.value), _line(y, x.value)[::-1]):
            axes.plot(*line, color=looks[method]["color"], linewidth=0.9, alpha=0.6)
            whiskers.append(line)
        axes.plot(x.value, y.value, linestyle="", markersize=8, **looks[method])
    set_limits_with_margin(
        axes.set_xlim, [end for xs, _ in whiskers for end in xs], score.column.form
    )
    set_limits_with_margin(
        axes.set_ylim, [end for _, ys in whiskers for end in ys], score.column.form
    )
    axes.set_xlabel(score.column.label)
    axes.set_ylabel(attacked.column.label)
    if score.column.form == "share":
        share_axis(axes, attacked.column.label)
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
    axes.set_title("Clean and under attack")
    label_points(figure, axes, points, lambda: [_box(axes, line) for line in whiskers])
    return figure


@styled
def draw_method_rows(quantities: Sequence[Quantity], looks: Looks) -> Figure:
    """A panel per quantity, a row per method: a point with its whisker, or no point.

    The method that is first in params.yaml stands at the top.
    """
    methods = [method for method in looks if any(method in one.cells for one in quantities)]
    figure = new_figure(5.0, max(4.3, 1.3 + 0.37 * len(methods)))
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        ends = [0.0]
        for place, method in enumerate(methods):
            if method not in quantity.cells:
                axes.text(
                    0.04,
                    place,
                    "none",
                    fontsize=8,
                    va="center",
                    transform=axes.get_yaxis_transform(),
                )
                continue
            interval = _scaled(quantity, method)
            line = _line(interval, float(place))
            axes.plot(*line, color=looks[method]["color"], linewidth=0.9, alpha=0.6)
            axes.plot(interval.value, place, linestyle="", markersize=8, **looks[method])
            ends += line[0]
        axes.set_title(panel_title(quantity), fontsize=8.5 if len(quantities) > 2 else 9.5)
        set_limits_with_margin(axes.set_xlim, *panel_limits(quantity, ends))
        print_values(axes, quantity, methods)
        if quantity.column.form == "share":
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(axis="x", labelsize=8.5)
    names = names_of(list(looks))
    panels[0].set_yticks(range(len(methods)), [names[method][1] for method in methods])
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def panel_limits(quantity: Quantity, ends: Sequence[float]) -> tuple[Sequence[float], str, bool]:
    """Return what ``set_limits_with_margin`` takes: from zero, but of errors where zero is so far
    away that points which differ would lie on each other, such as nats per word.
    """
    form = quantity.column.form
    near = [end for end in ends if end]
    error = quantity.column.name in ERRORS
    if error and near and min(near) > FAR * max(near):
        return near, form, False
    return ends, form, True


def names_of(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What stands at a method's point, and at its row: its name, or its number where many are."""
    if len(methods) <= NAMED:
        return {method: (method, method) for method in methods}
    return {
        method: (str(place), f"{method}  {place}") for place, method in enumerate(methods, start=1)
    }


def print_values(axes: Axes, quantity: Quantity, methods: Sequence[str]) -> None:
    """Each value above its point, on the side where there is room."""
    middle = sum(axes.get_xlim()) / 2
    scaled = NumberFormat.of("number", [_scaled(quantity, method) for method in quantity.cells])
    for place, method in enumerate(methods):
        if method in quantity.cells:
            value = _scaled(quantity, method).value
            text = f"{value:,.{scaled.places}f}"
            if quantity.column.form == "share":
                text = quantity.format.value(value)
            side = "right" if value > middle else "left"
            look = {"ha": side, "va": "bottom", "fontsize": 8}
            offset = (4 if side == "right" else -4, 7)
            axes.annotate(text, (value, place), offset, textcoords="offset points", **look)


def panel_title(quantity: Quantity) -> str:
    """A short one, in two lines."""
    name = quantity.column.name
    if name.startswith("routing_change"):
        return "Routing: overlap\nunder attack"
    if name.startswith("swapped_change"):
        return "Routing: overlap,\nwords swapped"
    return PANELS.get(name) or fill(quantity.column.label, WIDE)


def set_limits_with_margin(
    set_limits: Callable[[float, float], Any],
    ends: Sequence[float],
    form: str,
    from_zero: bool = False,
) -> None:
    """An axis that holds all of these, with room; of shares it ends a little beyond 0 and 1."""
    low = min(ends)
    high = max(ends)
    room = ROOM * ((high - low) or abs(high) or 1.0)
    first = low if from_zero and low >= 0 else low - room
    last = high + room
    if form == "share":
        first = max(first, -0.02)
        last = 1.03 if from_zero else min(last, 1.03)
    set_limits(first, last)


def _line(interval: Interval, across: float) -> Line:
    """A whisker: its ends, and where it stands on the other axis."""
    low, high = interval.limits or (interval.value, interval.value)
    return [low, high], [across, across]


def _scaled(quantity: Quantity, method: str) -> Interval:
    """As it is drawn: parameters, and products of a small model, in millions."""
    interval = quantity.interval(method)
    scale = {"active_parameters": 1e-6, "gflops": 1e3}.get(quantity.column.name, 1.0)
    if interval.limits is None:
        return Interval(interval.value * scale)
    low, high = interval.limits
    return Interval(interval.value * scale, low * scale, high * scale)


def _box(axes: Axes, line: Line) -> Bbox:
    """The pixels that a whisker takes."""
    (left, low), (right, high) = axes.transData.transform(list(zip(*line, strict=True)))
    return Bbox.from_extents(left - 1, low - 1, right + 1, high + 1)

"""How figures look: one calm style, colours that colour-blind readers can tell apart, ink that a page can recolour."""

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend

P = ParamSpec("P")

# Okabe & Ito (2008), darkest contrasts first; yellow last, as it is faint on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442")
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
INK = "#5b6472"  # text and axes: readable on white and on black; the page replaces it by its own colour
STYLE = {
    "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 10, "legend.fontsize": 9, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 4.5,
    "svg.fonttype": "none", "figure.constrained_layout.use": True,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color"), INK),
}  # fmt: skip


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator of a figure function: our style inside, matplotlib's settings as before afterwards.

    The figure is laid out once inside, because ticks are made, and take their colours, only when a figure is drawn.
    """

    @wraps(draw)
    def within(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
        return figure

    return within


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches on the Agg canvas, registered nowhere, so that nothing has to be closed."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def line_look(index: int) -> dict[str, str]:
    """Colour, marker and dash of the line with this index; no two of the first 32 look alike."""
    return {"color": PALETTE[index % 7], "marker": MARKERS[index % 8], "linestyle": DASHES[index // 7 % 4]}


def expert_colours(number: int) -> list[str]:
    """One colour an expert: the palette for up to 8, else steps of cividis (the number printed in a patch tells them apart)."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    return [to_hex(colormaps["cividis"](index / (number - 1))) for index in range(number)]


def legend_of(figure: Figure, axes: Axes, place: str) -> Legend:
    """The legend at ``place`` inside the axes; below them, in a figure made higher, where more than six lines would hide the curves."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= 6:
        return axes.legend(loc=place, ncols=2 if len(labels) > 4 else 1)
    columns = int(figure.get_figwidth() / 1.5)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    return figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)


def share_axis(axes: Axes, label: str) -> None:
    """A vertical axis of shares, printed as percent."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

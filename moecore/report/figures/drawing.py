"""How figures look: one calm style, colours that colour-blind readers can tell apart.

Their ink is one that a page can recolour.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

P = ParamSpec("P")

# Okabe & Ito (2008), darkest contrasts first; yellow last, as it is faint on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
INK = "#78828f"  # as readable on white as on a dark card; of an SVG the page recolours it
DARK = "#1c2733"  # of numbers on light cells, and of outlines
GUIDE = "#999999"  # of lines that say where something would be
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of methods and classes may have dollars
    "figure.constrained_layout.use": True,
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        INK,
    ),
}


class StyledFigure(Figure):
    """A figure that has our style whenever it is drawn: only then are ticks made and coloured."""

    caption = ""
    raster = False  # made of images: smaller as PNG than as SVG

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(STYLE):
            super().draw(renderer)


def finish_layout(figure: Figure) -> Figure:
    """The figure with its layout done, so that printing its canvas draws it once, not twice."""
    with matplotlib.rc_context(STYLE):
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
    return figure


def styled_drawing(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator of a figure function: our style inside, matplotlib's settings as before outside."""

    @wraps(draw)
    def within(*args: P.args, **kwargs: P.kwargs) -> Figure:
        return draw_in_style(draw, *args, **kwargs)

    return within


def draw_in_style(draw: Callable[P, Figure], *args: P.args, **kwargs: P.kwargs) -> Figure:
    """Return the figure that ``draw`` makes while matplotlib's settings are ours."""
    with matplotlib.rc_context(STYLE):
        return draw(*args, **kwargs)


def empty_figure(
    width: float, height: float, caption: str = "", raster: bool = False
) -> StyledFigure:
    """An empty figure in inches on the Agg canvas, registered nowhere: nothing has to be closed."""
    figure = StyledFigure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.caption = caption
    figure.raster = raster
    return figure


def line_look(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the line with this index; no two of the first 28 look alike."""
    return {
        "color": PALETTE[index % 7],
        "marker": MARKERS[index % 8],
        "linestyle": DASHES[index // 7 % 4],
    }


def expert_colours(number: int) -> list[str]:
    """One colour an expert: the palette for up to 8, else steps of cividis.

    The number printed in a patch tells close ones apart.
    """
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    return [to_hex(colormaps["cividis"](index / (number - 1))) for index in range(number)]


def add_legend_below(figure: Figure, axes: Axes) -> Legend:
    """The legend below the panels, in a figure made higher by its lines: it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    widest = 0.6 + 0.08 * max(map(len, labels), default=0)  # inches, with the handle
    rows = math.ceil(len(labels) / max(1, int(figure.get_figwidth() / widest))) or 1
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    return figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=math.ceil(len(labels) / rows) or 1,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def set_percent_axis(axes: Axes, label: str) -> None:
    """A vertical axis of shares, printed as percent; 0.775 is 77.5%, not 78%."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def set_epoch_axis(axes: Axes) -> None:
    """A horizontal axis of epochs, whose ticks are whole numbers."""
    axes.set_xlabel("Epoch")
    first, last = axes.get_xlim()
    if last - first < 1:  # one epoch: matplotlib would print 1.975 and 2.025 around it
        middle = round((first + last) / 2)
        axes.set_xlim(middle - 1, middle + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def strip_axes(axes: Axes) -> None:
    """No ticks, no grid, no frame."""
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)

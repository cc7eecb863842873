"""Style and basic elements of figures: colours, line styles, axes, legends, sheets of pictures."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox
else:  # only functions that draw import matplotlib, which takes a third of a second
    Axes = Figure = Legend = Line2D = Bbox = Any

P = ParamSpec("P")

# Okabe & Ito (2008), darkest contrasts first; yellow last, as it is faint on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
INK = "#78828f"  # readable on white and on a dark card; the page recolours it in an SVG
DARK = "#1c2733"  # of numbers on light cells, and of outlines
GUIDE = "#999999"  # reference lines
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "text.parse_math": False,  # names of methods and classes may have dollars
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "svg.fonttype"), "none"),
    **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow", "figure.constrained_layout.use"), True),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
}


def freeze_layout(figure: Figure) -> Figure:
    """Compute the figure's layout once, so that printing does not compute it again; return it."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        if engine := figure.get_layout_engine():
            engine.execute(figure)
        figure.set_layout_engine("none")
    return figure


def styled_drawing(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function that returns a figure, so that it runs with the report's ``STYLE``."""

    @wraps(draw)
    def within(*args: P.args, **kwargs: P.kwargs) -> Figure:
        return draw_in_style(draw, *args, **kwargs)

    return within


def draw_in_style(draw: Callable[P, Figure], *args: P.args, **kwargs: P.kwargs) -> Figure:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return draw(*args, **kwargs)


def create_figure(width: float, height: float, caption: str = "", raster: bool = False) -> Figure:
    """Return an empty figure (inches) in the report's style; ``raster``: shown as PNG, not SVG."""
    from moecore.report.figures.styled_figure import StyledFigure

    return StyledFigure((width, height), caption, raster, STYLE)


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line style for the line ``index``; the first 28 are distinct."""
    dash = DASHES[index // 7 % 4]
    return {"color": PALETTE[index % 7], "marker": MARKERS[index % 8], "linestyle": dash}


def expert_colours(number: int) -> list[str]:
    """Return one colour per expert: the palette for up to 8 experts, else steps of cividis."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    from matplotlib import colormaps, colors

    return [colors.to_hex(colormaps["cividis"](index / (number - 1))) for index in range(number)]


def add_legend_below(figure: Figure, axes: Axes) -> Legend:
    """Add a legend below the panels, for which the figure gets higher; return the legend."""
    handles, labels = axes.get_legend_handles_labels()
    widest = 0.6 + 0.08 * max(map(len, labels), default=0)  # inches, with the handle
    rows = math.ceil(len(labels) / max(1, int(figure.get_figwidth() / widest))) or 1
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    style: Any = {"loc": "outside lower center", "columnspacing": 1.2, "handletextpad": 0.5}
    return figure.legend(handles, labels, ncols=math.ceil(len(labels) / rows) or 1, **style)


def set_percent_axis(axes: Axes, label: str) -> None:
    """Set the vertical axis' label, and print its shares as percent (0.775 as 77.5%)."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def set_epoch_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("Epoch")
    first, last = axes.get_xlim()
    if last - first < 1:  # one epoch: matplotlib would print 1.975 and 2.025 around it
        middle = round((first + last) / 2)
        axes.set_xlim(middle - 1, middle + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def strip_axes(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


GAP = 0.06  # between pictures, of a picture's width
NAMES_WIDTH = 0.7  # inches for the names of rows
MIN_ROTATED_NAME_HEIGHT = 0.6  # inches; in a lower row a rotated name would reach into the next
LUMINANCE_WEIGHTS = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
MAX_NUMBERED_PATCHES = 100  # per image; more numbers would not be legible


class ImageTile(NamedTuple):
    """One image of a sheet, optionally with a colour and a text per patch."""

    pixels: np.ndarray  # (H, W), (H, W, 3) or (H, W, 4), ready to be shown
    tint: np.ndarray | None = None  # (rows, columns, 4): RGBA per patch
    texts: np.ndarray | None = None  # (rows, columns) of text; "" for none


class SheetLabels(NamedTuple):
    title: str
    rows: Sequence[str]
    columns: Sequence[str] = ()
    right: Sequence[str] = ()  # a remark right of each row
    caption: str = ""


@styled_drawing
def draw_picture_sheet(
    tiles: list[list[ImageTile]], frame: SheetLabels, width: float, height: float
) -> Figure:
    """Return a figure with labelled rows of images; each image is ``width`` × ``height`` inches."""
    across = max(len(row) for row in tiles)
    top = (0.3 if frame.title else 0.05) + (0.2 if frame.columns else 0)
    right = 0.55 if frame.right else 0.05
    size = (NAMES_WIDTH + across * width + right, top + len(tiles) * height + 0.05)
    figure = create_figure(*size, frame.caption, raster=True)
    figure.set_layout_engine("none")
    high = len(tiles) * height / size[1]
    axes = figure.add_axes((NAMES_WIDTH / size[0], 0.05 / size[1], across * width / size[0], high))
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            draw_tile(axes, tile, column, row)
    strip_axes(axes)
    axes.set(xlim=(-GAP, across - GAP / 2), ylim=(len(tiles), -GAP / 2), aspect="auto")
    middle = 0.5 - GAP / 2
    for row, name in enumerate(frame.rows):
        text = axes.text(-2 * GAP, row + middle, name, ha="right", va="center", fontsize=8)
        if height > MIN_ROTATED_NAME_HEIGHT:
            text.set(rotation=90, fontsize=9)
    for column, name in enumerate(frame.columns):
        axes.text(column + middle, -GAP, name, ha="center", va="bottom", fontsize=8)
    for row, remark in enumerate(frame.right):
        axes.text(across, row + middle, remark, va="center", fontsize=7.5)
    if frame.title:
        figure.text(0.01, 1 - 0.06 / size[1], frame.title, va="top", fontweight="bold")
    return figure


def draw_tile(axes: Axes, tile: ImageTile, column: int, row: int) -> None:
    """Draw an image into the unit square of the axes whose corner is (column, row)."""
    side = 1 - GAP
    box = (column, column + side, row + side, row)
    style: Any = {"extent": box, "interpolation": "nearest", "aspect": "auto"}
    # matplotlib leaves colours as they are: the map and its ends hold for one channel only.
    axes.imshow(tile.pixels, cmap="gray", vmin=0, vmax=255, **style)
    if tile.tint is not None:
        axes.imshow(tile.tint, **style)
    if tile.texts is None or tile.texts.size > MAX_NUMBERED_PATCHES:
        return
    rows, columns = tile.texts.shape
    style = {"ha": "center", "va": "center", "fontsize": 7.5, "fontweight": "bold"}
    for (y, x), text in np.ndenumerate(tile.texts):
        if text:
            place = column + side * (x + 0.5) / columns, row + side * (y + 0.5) / rows
            colour = "white" if _brightness(tile, y, x, *tile.texts.shape) < 0.55 else DARK
            axes.text(*place, text, color=colour, **style)


def _brightness(tile: ImageTile, y: int, x: int, rows: int, columns: int) -> float:
    height, width = tile.pixels.shape[:2]
    down = slice(y * height // rows, (y + 1) * height // rows)
    across = slice(x * width // columns, (x + 1) * width // columns)
    shown = float(tile.pixels[down, across].mean()) / 255
    if tile.tint is None:
        return shown
    colour = tile.tint[y, x]
    return (1 - colour[3]) * shown + colour[3] * float(colour[:3] @ LUMINANCE_WEIGHTS)


def displayable_image(image: np.ndarray) -> np.ndarray:
    """Return an image (C, H, W) as (H, W, 3) if C ≥ 3, else its first channel (H, W)."""
    return image[:3].transpose(1, 2, 0) if len(image) >= 3 else image[0]


def patch_expert_colours(grid: np.ndarray, colours: Sequence[str]) -> np.ndarray:
    """Return a half-transparent RGBA colour per patch; grid: each patch's expert, −1: none."""
    from matplotlib.colors import to_rgba

    return np.array([to_rgba(colour, 0.55) for colour in colours] + [(0.0, 0.0, 0.0, 0.0)])[grid]


def heat_colours(values: np.ndarray, largest: float) -> np.ndarray:
    """Return values from 0 to ``largest`` as RGBA colours (…, 4); NaN is transparent."""
    from matplotlib import colormaps

    colours = colormaps["magma"](np.nan_to_num(values) / max(largest, 1e-12))
    colours[~np.isfinite(values)] = 0
    return colours

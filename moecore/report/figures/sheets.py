"""Contact sheets: many small pictures in one figure, with a mark in every patch.

All pictures share one axes: an axes each made a page of 24 methods take minutes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from moecore.report.figures.drawing import DARK, empty_figure, strip_axes, styled_drawing

GAP = 0.06  # between pictures, of a picture's width
LEFT = 0.7  # inches for the names of rows
LOW = 0.6  # inches: in a row that is lower, a name that stands upright reaches into the next
LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
PRINTED = 100  # patches, at most, that get their number


class Tile(NamedTuple):
    """One picture."""

    pixels: np.ndarray  # (H, W), (H, W, 3) or (H, W, 4), ready to be shown
    tint: np.ndarray | None = None  # (rows, columns, 4): a colour a patch
    words: np.ndarray | None = None  # (rows, columns) of text; "" for none


class SheetLabels(NamedTuple):
    """What stands around the pictures."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str] = ()
    right: Sequence[str] = ()  # a remark beside each row
    caption: str = ""


@styled_drawing
def sheet(
    tiles: Sequence[Sequence[Tile]], frame: SheetLabels, width: float, height: float
) -> Figure:
    """Rows of pictures, ``width`` × ``height`` inches each."""
    across = max(len(row) for row in tiles)
    top = (0.3 if frame.title else 0.05) + (0.2 if frame.columns else 0)
    right = 0.55 if frame.right else 0.05
    size = (LEFT + across * width + right, top + len(tiles) * height + 0.05)
    figure = empty_figure(*size, frame.caption, raster=True)
    figure.set_layout_engine("none")
    high = len(tiles) * height / size[1]
    axes = figure.add_axes((LEFT / size[0], 0.05 / size[1], across * width / size[0], high))
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            put(axes, tile, column, row)
    strip_axes(axes)
    axes.set(xlim=(-GAP, across - GAP / 2), ylim=(len(tiles), -GAP / 2), aspect="auto")
    _words(axes, frame, across, upright=height > LOW)
    if frame.title:
        figure.text(0.01, 1 - 0.06 / size[1], frame.title, va="top", fontweight="bold")
    return figure


def put(axes: Axes, tile: Tile, column: int, row: int) -> None:
    """A picture in the square that begins at (column, row)."""
    side = 1 - GAP
    box = (column, column + side, row + side, row)
    look: Any = {"extent": box, "interpolation": "nearest", "aspect": "auto"}
    # matplotlib leaves colours as they are: the map and its ends hold for one channel only.
    axes.imshow(tile.pixels, cmap="gray", vmin=0, vmax=255, **look)
    if tile.tint is not None:
        axes.imshow(tile.tint, **look)
    if tile.words is None or tile.words.size > PRINTED:
        return
    rows, columns = tile.words.shape
    for (y, x), text in np.ndenumerate(tile.words):
        if text:
            axes.text(
                column + side * (x + 0.5) / columns,
                row + side * (y + 0.5) / rows,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                fontweight="bold",
                color="white" if _brightness(tile, y, x, tile.words.shape) < 0.55 else DARK,
            )


def _brightness(tile: Tile, y: int, x: int, patches: tuple[int, ...]) -> float:
    """How bright one of the ``patches``, (rows, columns), is below its mark, from 0 to 1."""
    rows, columns = patches
    height, width = tile.pixels.shape[:2]
    down = slice(y * height // rows, (y + 1) * height // rows)
    across = slice(x * width // columns, (x + 1) * width // columns)
    shown = float(tile.pixels[down, across].mean()) / 255
    if tile.tint is None:
        return shown
    colour = tile.tint[y, x]
    return (1 - colour[3]) * shown + colour[3] * float(colour[:3] @ LUMINANCE)


def _words(axes: Axes, frame: SheetLabels, across: int, upright: bool) -> None:
    middle = 0.5 - GAP / 2
    for row, name in enumerate(frame.rows):
        text = axes.text(-2 * GAP, row + middle, name, ha="right", va="center", fontsize=8)
        if upright:
            text.set(rotation=90, fontsize=9)
    for column, name in enumerate(frame.columns):
        axes.text(column + middle, -GAP, name, ha="center", va="bottom", fontsize=8)
    for row, words in enumerate(frame.right):
        axes.text(across, row + middle, words, va="center", fontsize=7.5)


def displayable_image(image: np.ndarray) -> np.ndarray:
    """An image (C, H, W) uint8 ready to be shown: three channels in colour, else the first."""
    return image[:3].transpose(1, 2, 0) if len(image) >= 3 else image[0]


def patch_expert_colours(grid: np.ndarray, colours: Sequence[str]) -> np.ndarray:
    """The colour of each patch's expert, half clear; a patch without an expert (−1) stays bare."""
    palette = np.array([to_rgba(colour, 0.55) for colour in colours] + [(0.0, 0.0, 0.0, 0.0)])
    return palette[grid]


def heat_colours(values: np.ndarray, largest: float) -> np.ndarray:
    """Values from 0 to ``largest`` as colours (…, 4); NaN stays clear."""
    colours = colormaps["magma"](np.nan_to_num(values) / max(largest, 1e-12))
    colours[~np.isfinite(values)] = 0
    return colours

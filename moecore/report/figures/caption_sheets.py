"""Pictures with the experts of their patches, beside captions with the experts of the words."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.measure.exploring.overlays import Overlays, expert_grid
from moecore.measure.retrieval import Read
from moecore.report.figures.drawing import expert_colours, new_figure, strip_axes, styled
from moecore.report.figures.sheets import Tile, picture, put, tints

SIDE = 1.5  # inches of a picture, and of its row
WIDE = 4.6  # inches of the words beside it
LETTER = 0.075  # inches of a letter of equal width, with what stands around it
LINE = 0.27  # inches
BELOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@styled
def read_images(stored: Overlays, captions: Sequence[Sequence[Read]], experts: int) -> Figure:
    """A row per image: its patches in the colours of their experts in the last layer that has some,
    and a caption's words in those of theirs, each with its expert's number. A dense tower's stay
    bare.

    captions: an image → layers of the text tower; experts: of one of its layers.
    """
    images = stored.images()
    size = (SIDE + WIDE, SIDE * len(images) + 0.05)
    caption = "Left: the expert with most weight in each patch, right: of each word. Last layers."
    figure = new_figure(*size, caption, raster=True)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size[0] / SIDE), ylim=(size[1] / SIDE, 0), aspect="auto")
    colours = expert_colours(stored.experts) if stored.experts else []
    for row, image in enumerate(images):
        tile = Tile(picture(image))
        if stored.grids:
            grid = expert_grid(stored.grids[-1][row])
            tile = Tile(tile.pixels, tints(grid, colours), np.where(grid < 0, "", grid.astype(str)))
        put(axes, tile, 0, row)
        if captions[row]:
            write(axes, captions[row][-1], row, expert_colours(experts) if experts else [])
    strip_axes(axes)
    return figure


def write(axes: Axes, words: Read, row: int, colours: Sequence[str]) -> None:
    """Words one after another, in as many lines as they need."""
    left, line = 0.0, 0
    for word, expert in words:
        text = f"{word}{str(expert).translate(BELOW)}" if expert >= 0 else word
        width = LETTER * (len(text) + 1.5)
        if left + width > WIDE - 0.2 and left:
            left, line = 0.0, line + 1
        box = {"boxstyle": "round,pad=0.2", "linewidth": 0, "facecolor": "none"}
        if expert >= 0:
            box |= {"facecolor": colours[expert], "alpha": 0.45}
        x, y = (SIDE + 0.15 + left) / SIDE, row + (0.12 + LINE * line) / SIDE
        axes.text(x, y, text, fontsize=8, family="monospace", va="center", bbox=box)
        left += width

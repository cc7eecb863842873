"""The page of a model's predictions: every picture with its answer, and who processed its patches.

One HTML file that needs nothing else, light or dark.
"""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from moecore.report.figures.drawing import expert_colours
from moecore.report.page.templating import template_environment

SHOWN = 500  # files of a page, at most: more would make it tens of megabytes
SMALL = 96  # pixels: up to here a picture is kept as it is, above as JPEG


class Tile(NamedTuple):
    """A picture as an address, and the experts of its patches in every layer.

    experts: a layer → rows of patches → the experts of a patch, the first with most weight.
    """

    picture: str
    experts: list[list[list[list[int]]]]
    label: str = ""


class Shown(NamedTuple):
    """One file: its name, the answer, and its tiles (one of a picture, three of a volume)."""

    name: str
    answer: str
    tiles: list[Tile]
    more: Sequence[str] = ()  # lines below the answer


class RoutedText(NamedTuple):
    """One text: its words with their experts per MoE layer, and the pictures that lie nearest."""

    text: str
    layers: list[list[tuple[str, list[int]]]]
    nearest: list[str]
    remark: str = ""


class Failure(NamedTuple):
    """A file without a prediction, and why."""

    name: str
    reason: str


class PredictedPage(NamedTuple):
    """All that the page says."""

    model: str
    data: str
    remarks: Sequence[str]
    shown: Sequence[Shown]
    total: int  # files
    failures: Sequence[Failure]
    experts: int = 0  # of a layer; 0 of a dense model
    texts: Sequence[RoutedText] = ()
    text_experts: int = 0  # of a layer of the text tower


def render_predictions(content: PredictedPage) -> str:
    """Return the whole page."""
    return (
        template_environment()
        .get_template("predicted.html.jinja")
        .render(
            page=content,
            routing={
                "colours": expert_colours(content.experts),
                "items": [[tile.experts for tile in one.tiles] for one in content.shown],
            },
            layers=len(content.shown[0].tiles[0].experts) if content.shown else 0,
            colours=expert_colours(content.text_experts),
        )
    )


def picture_tile_with_experts(
    pixels: np.ndarray, experts: Sequence[np.ndarray], label: str = ""
) -> Tile:
    """Return a picture uint8 (C, H, W) of one or three channels with the experts of its patches.

    experts: a layer (rows, columns, k).
    """
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind)
    address = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Tile(address, [layer.tolist() for layer in experts], label)


def middle_slice_tiles(volume: np.ndarray, experts: Sequence[np.ndarray]) -> list[Tile]:
    """Return the three middle slices of a volume (1, D, H, W) in [0, 1].

    experts: a layer (d, h, w, k) of patches.
    """
    tiles = []
    for axis, label in enumerate(("first axis", "second axis", "third axis")):
        cut = np.take(volume[0], volume.shape[axis + 1] // 2, axis=axis)
        pixels = np.rint(np.clip(cut.astype(np.float32), 0, 1) * 255).astype(np.uint8)
        layers = [np.take(layer, layer.shape[axis] // 2, axis=axis) for layer in experts]
        tiles.append(picture_tile_with_experts(pixels[None], layers, label))
    return tiles

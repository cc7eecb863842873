"""What a trace is: a folder with ``trace.json`` and files of safetensors, in which any program can
leave what the routers of any model did with a stream of items: texts or images.

B items of a file, T tokens of each, E experts, S the most experts that a token chose. A file has
for each MoE layer, by its number from 0:

``0.experts``  integers (B, T, S): those chosen before capacity; −1 where a token chose fewer
``0.weights``  (B, T, S): of their outputs; 0 where an expert had no room
``0.probs``    (B, T, E): the router's probabilities, without noise

and, where they are known, ``tokens`` and ``positions``, integers (B, T), ``labels``, integers (B,)
or (B, T) from 0, below 0 where one is not known, and ``pictures``, bytes (B, C, H, W), gray or red,
green and blue, small. Layers may differ in E and T, items may not: a text is cut into parts of one
length, without padding. ``trace.json`` is a ``TraceCard``.

Its ``format`` is 2; 1 had no ``special``, ``grid`` and ``pictures``. The number rises when a
program for the number before cannot read a trace; moecore reads all up to its own.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout

FORMAT = 2
CARD = "trace.json"
BESIDE = ("tokens", "positions", "labels", "pictures")
LARGEST = 256  # pixels along a side of a picture


class LayerShape(Config):
    """One MoE layer."""

    experts: int = Field(ge=1)
    tokens: int = Field(ge=1)  # of an item
    k: int = Field(ge=0)  # experts that a token chose, at most
    special: int = Field(0, ge=0)  # tokens in front that are no patches, or no words
    grid: tuple[int, ...] = ()  # of the others, the last axis the fastest; (): in a row

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_layout(self.tokens, self.special, self.grid)
        return self

    def layout(self, size: Sequence[int] = ()) -> TokenLayout:
        """Return where the tokens lie, of pictures with so many pixels along each axis."""
        grid = self.grid or (self.tokens - self.special,)
        return TokenLayout(self.special, grid, tuple(size))


def check_layout(tokens: int, special: int, grid: Sequence[int]) -> None:
    """Raise ValueError unless special tokens and a grid, if there is one, are all tokens."""
    if special >= tokens or (grid and special + prod(grid) != tokens):
        problem = f"found {special} special tokens and a grid {tuple(grid)}"
        raise ValueError(f"{problem}; allowed: together the {tokens} tokens of the layer")


class ChunkFile(Config):
    """One file, with some of the items."""

    file: str = Field(pattern=r"^[\w.-]+$")
    items: int = Field(ge=1)
    sha256: str | None = None  # None: its bytes are not verified


class TraceCard(Config):
    """``trace.json``."""

    format: Literal[1, 2]
    model: str
    layers: tuple[LayerShape, ...] = Field(min_length=1)
    chunks: tuple[ChunkFile, ...] = Field(min_length=1)
    vocabulary: tuple[str, ...] = ()  # the word of each token's number


def check_tokens_in_vocabulary(tokens: Tensor, words: int, where: str) -> None:
    """Raise UserError where a token has no word in a vocabulary of so many; 0: there is none."""
    wrong = tokens[(tokens < 0) | (tokens >= words)]
    if words and wrong.numel():
        allowed = f"0 to {words - 1}, the words of the vocabulary: is it of another tokenizer?"
        raise UserError(f"{where}: tokens: found {int(wrong[0])}; allowed: {allowed}")


def check_layer_values(probs: Tensor, weights: Tensor, where: str) -> None:
    """Raise UserError for probabilities that are below 0, or no numbers, and for such weights."""
    for name, values, wrong in (
        ("probs", probs, ~probs.isfinite() | (probs < 0)),
        ("weights", weights, ~weights.isfinite()),
    ):
        if wrong.any():
            allowed = "finite numbers" + ", not below 0" * (name == "probs")
            raise UserError(f"{where}.{name}: found {float(values[wrong][0])}; allowed: {allowed}")


def check_beside(
    name: str, values: Any, items: int, layers: Sequence[LayerShape], where: str
) -> None:
    """Raise UserError unless these are integers (items, T), T the tokens of any layer; labels may
    be (items,), too, and pictures are what ``check_pictures`` says.
    """
    if name not in BESIDE:
        raise UserError(f"{where}: found {name}; allowed: {', '.join(BESIDE)}")
    if not isinstance(values, Tensor):
        raise UserError(f"{where}: {name}: found {type(values).__name__}; allowed: a tensor")
    if name == "pictures":
        check_pictures(values, items, layers, where)
        return
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise UserError(f"{where}: {name}: found {values.dtype}; allowed: integers")
    shapes: list[tuple[int, ...]] = [
        (items, number) for number in dict.fromkeys(layer.tokens for layer in layers)
    ]
    if name == "labels":
        shapes.append((items,))
    if tuple(values.shape) not in shapes:
        problem = f"found {name} of shape {tuple(values.shape)}"
        raise UserError(f"{where}: {problem}; allowed: {' or '.join(map(str, shapes))}")


def check_pictures(values: Tensor, items: int, layers: Sequence[LayerShape], where: str) -> None:
    """Raise UserError unless these are bytes (items, 1 or 3, H, W), small, of whole patches."""
    size = values.shape[2:]
    fits = values.ndim == 4 and len(values) == items and values.shape[1] in (1, 3)
    if not fits or values.dtype != torch.uint8 or max(size) > LARGEST:
        problem = f"found pictures of shape {tuple(values.shape)}, {values.dtype}"
        allowed = f"({items}, 1 or 3, height, width), torch.uint8, sides of {LARGEST} at most"
        raise UserError(f"{where}: {problem}; allowed: {allowed}")
    for layer in layers:
        if len(layer.grid) != 2 or any(side % n for side, n in zip(size, layer.grid, strict=True)):
            problem = f"found pictures of {tuple(size)} pixels and a grid {layer.grid} of patches"
            raise UserError(f"{where}: {problem}; allowed: grids of two axes that divide the sides")

"""A grid of tokens cut into windows, shifted or not, and put together again (Swin: Liu 2021).

B images, T tokens of a grid (rows × columns, columns fastest), W windows of n tokens, d width.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

Grid = tuple[int, ...]


def window_and_shift(grid: Grid, window: int, shifted: bool) -> tuple[Grid, Grid]:
    """The window per axis, at most the grid's length, and its shift: half, or none if it spans."""
    sizes = tuple(min(window, length) for length in grid)
    shifts = tuple(
        size // 2 if shifted and size < length else 0
        for size, length in zip(sizes, grid, strict=True)
    )
    return sizes, shifts


class Windows(nn.Module):
    """Cuts (B, T, d) into windows (B, W, n, d), and back; one gather each.

    A grid that the window does not divide is padded on its last sides first and shifted then: what
    lies in one window, and shows parts of the image that do not touch, is kept apart by ``mask``,
    (W, n, n), 0 or −∞ (None where all may see each other), and so is padding from tokens. On other
    grids these are the windows and masks of the paper.
    """

    places: Tensor
    back: Tensor
    mask: Tensor | None

    def __init__(self, grid: Grid, window: int, shifted: bool) -> None:
        super().__init__()
        self.grid = grid
        self.size, self.shift = window_and_shift(grid, window, shifted)
        self.tokens = math.prod(grid)
        places, back, mask = _gather_indices(grid, self.size, self.shift)
        self.number, self.length = places.shape
        self.padded = places.numel() != self.tokens
        # not persistent: all follows from the sizes
        self.register_buffer("places", to_build_device(places.flatten()), persistent=False)
        self.register_buffer("back", to_build_device(back), persistent=False)
        self.register_buffer("mask", to_build_device(mask), persistent=False)

    def cut(self, tokens: Tensor) -> Tensor:
        """(B, T, d) to (B, W, n, d); zeros where there is padding."""
        cut = _GatherPadded.apply(tokens, self.places, self.back, self.padded, False)
        return cut.unflatten(1, (self.number, self.length))

    def join(self, windows: Tensor) -> Tensor:
        """(B, W, n, d) to (B, T, d); padding is dropped."""
        return _GatherPadded.apply(
            windows.flatten(1, 2), self.back, self.places, False, self.padded
        )

    def whole(self, attention: Tensor) -> Tensor:
        """Attention inside the windows, (B, W, n, n), as that of all tokens, (B, T, T)."""
        rows = self.places.view(self.number, self.length, 1)
        columns = rows.transpose(1, 2)
        real = (rows < self.tokens) & (columns < self.tokens)
        flat = torch.where(real, rows * self.tokens + columns, self.tokens**2).flatten()
        full_attention = attention.new_zeros(len(attention), self.tokens**2 + 1)
        full_attention = full_attention.index_copy(1, flat, attention.flatten(1))
        return full_attention[:, :-1].unflatten(1, (self.tokens, self.tokens))


class _GatherPadded(Function):
    """``values[:, index]``, whose gradient is the gather with the inverse, as each row is taken
    once. An index one behind the last row is padding: zeros.
    """

    @staticmethod
    # a context has no common type  # pyrefly: ignore[bad-override]
    def forward(
        ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, padded: bool, dropped: bool
    ) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.padded = padded
        ctx.dropped = dropped
        if padded:
            values = pad(values, (0, 0, 0, 1))
        return values.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyrefly: ignore[bad-override]
        index, inverse = ctx.saved_tensors
        to_values = _GatherPadded.apply(gradient, inverse, index, ctx.dropped, ctx.padded)
        return to_values, None, None, None, None


def to_build_device(tensor: Tensor | None) -> Tensor | None:
    """The tensor on the device that models are being built on, shared by modules."""
    return None if tensor is None else tensor.to(torch.get_default_device())


@lru_cache(maxsize=256)
def _gather_indices(grid: Grid, size: Grid, shift: Grid) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return where every place of every window (W, n) comes from, the inverse (T,), and the mask
    (W, n, n); on the CPU, whatever models are being built on: the same for all blocks.
    """
    with torch.device("cpu"):
        places, labels = _lay_out_windows(grid, size, shift)
        tokens = math.prod(grid)
        back = torch.empty(tokens + 1, dtype=torch.int64)
        back[places.flatten()] = torch.arange(places.numel())
        if places.numel() == tokens and not any(shift):
            return places, back[:tokens], None
        apart = labels[:, :, None] != labels[:, None, :]
        return places, back[:tokens], torch.zeros(apart.shape).masked_fill(apart, -math.inf)


def _lay_out_windows(grid: Grid, size: Grid, shift: Grid) -> tuple[Tensor, Tensor]:
    """Of every place (W, n) its token, T for padding, and a label of who sees whom."""
    rows, columns = grid
    full = [math.ceil(length / side) * side for length, side in zip(grid, size, strict=True)]
    tokens = torch.full(full, rows * columns, dtype=torch.int64)
    tokens[:rows, :columns] = torch.arange(rows * columns).view(rows, columns)
    tokens = torch.roll(tokens, [-one for one in shift], (0, 1))
    wrapped = [
        torch.arange(length) >= length - one for length, one in zip(full, shift, strict=True)
    ]
    labels = 2 * wrapped[0].long()[:, None] + wrapped[1].long()[None, :]
    labels = labels.masked_fill(tokens == rows * columns, 4)
    return _cut_windows(tokens, size), _cut_windows(labels, size)


def _cut_windows(values: Tensor, size: Grid) -> Tensor:
    down, across = (length // side for length, side in zip(values.shape, size, strict=True))
    cut = values.view(down, size[0], across, size[1]).transpose(1, 2)
    return cut.reshape(down * across, size[0] * size[1])


class PatchMerging(nn.Module):
    """2 × 2 tokens become one of twice the width: (B, T, d) to (B, ⌈rows/2⌉·⌈columns/2⌉, 2d).

    An odd grid is padded by zeros on its last sides. ``post_norm``: the norm follows the linear map
    (Swin V2), and otherwise comes before it. Names are timm's.
    """

    def __init__(self, grid: Grid, width: int, post_norm: bool) -> None:
        super().__init__()
        self.grid = grid
        self.post_norm = post_norm
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        nn.init.trunc_normal_(self.reduction.weight, std=0.02)
        self.norm = nn.LayerNorm(2 * width if post_norm else 4 * width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, columns = self.grid
        cells = tokens.unflatten(1, self.grid)
        if rows % 2 or columns % 2:
            cells = pad(cells, (0, 0, 0, columns % 2, 0, rows % 2))
        four = cells.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, r, 2, c, 2, d)
        four = four.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)
        if self.post_norm:
            return self.norm(self.reduction(four))
        return self.reduction(self.norm(four))


def merged_grid(grid: Grid) -> Grid:
    """The grid behind a ``PatchMerging``."""
    return tuple(math.ceil(length / 2) for length in grid)

"""One linear map per expert over tiles of rows, each of one expert: what grouped_mm does not take
on CUDA, and what is compiled on a CPU.

No shape depends on how the rows are spread over the experts, so the host never waits for the
device, all tiles are one batched product, and it is one graph for torch.compile. Products of fp32
are taken in fp32. Taking each number as a sum of three bf16 does not work through grouped_mm: torch
2.13 rounds its output to bf16 on every device (`out_dtype=torch.float32` is refused,
GroupedMMUtils.h), though sums are fp32 inside.

E experts, R rows, i inputs, o outputs, n tiles of m rows.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

_SMALLEST, _LARGEST = 8, 1024  # rows of a tile


class Tiles(NamedTuple):
    """Which rows lie in which tile; an expert's last may be part empty, others empty."""

    experts: Tensor  # (n,) int64, ascending
    rows: Tensor  # (n·m,) the row at each place; any where there is none
    there: Tensor  # (n·m, 1) bool, whether there is a row
    places: Tensor  # (R,) the place of each row
    height: int  # m

    @classmethod
    def of(cls, offsets: Tensor, rows: int, height: int) -> "Tiles":
        """The tiles of ``rows`` rows; offsets: (E,), where each expert's rows end."""
        experts = len(offsets)
        ends = offsets.long()
        sizes = ends.diff(prepend=ends.new_zeros(1))
        begins = ends - sizes
        each = (sizes + height - 1).div(height, rounding_mode="floor")
        last = each.cumsum(0)
        first = last - each
        numbers = torch.arange(tile_count(rows, experts, height), device=offsets.device)
        # Past the last tile all are of the last expert, and hold none of its rows.
        of = torch.searchsorted(last, numbers, right=True).clamp_(max=experts - 1)
        within = (numbers - first[of]).unsqueeze(1) * height
        within = within + torch.arange(height, device=offsets.device)
        there = (within < sizes[of].unsqueeze(1)).flatten()
        held = torch.where(there, (within + begins[of].unsqueeze(1)).flatten(), 0)
        row = torch.arange(rows, device=offsets.device)
        whose = torch.searchsorted(ends, row, right=True)
        places = row - begins[whose] + first[whose] * height
        return cls(of, held, there.unsqueeze(1), places, height)

    def fill_tiles(self, values: Tensor) -> Tensor:
        """Values (R, w) as tiles (n, m, w), with zeros where there is no row."""
        held = values.index_select(0, self.rows).where(self.there, 0)
        return held.unflatten(0, (-1, self.height))

    def read_rows(self, tiles: Tensor) -> Tensor:
        """Return what lies in tiles (n, m, w) at the rows' places, (R, w)."""
        return tiles.flatten(0, 1).index_select(0, self.places)

    def sum_by_expert(self, values: Tensor, experts: int) -> Tensor:
        """The sum (E, …) of each expert's tiles (n, …), always in the same order."""
        of = torch.arange(experts, device=values.device).unsqueeze(1) == self.experts
        return (of.to(values.dtype) @ values.flatten(1)).unflatten(1, values.shape[1:])


class TiledProduct(Function):
    """grouped_linear by one batched product, of one dtype; offsets (E,)."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        tiles = _make_tiles(rows, offsets)
        values = tiles.fill_tiles(rows)
        of_tiles = weight.index_select(0, tiles.experts)
        if bias is None:
            return tiles.read_rows(torch.bmm(values, of_tiles))
        added = bias.index_select(0, tiles.experts).unsqueeze(1)
        return tiles.read_rows(torch.baddbmm(added, values, of_tiles))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        rows, weight, bias, offsets = inputs
        ctx.save_for_backward(rows, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows, weight, offsets = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        tiles = _make_tiles(rows, offsets)
        given = tiles.fill_tiles(grad)
        to_rows = to_weight = to_bias = None
        if wants_rows:
            of_tiles = weight.index_select(0, tiles.experts)
            to_rows = tiles.read_rows(torch.bmm(given, of_tiles.mT))
        if wants_weight:
            products = torch.bmm(tiles.fill_tiles(rows).mT, given)
            to_weight = tiles.sum_by_expert(products, len(weight))
        if wants_bias:
            to_bias = tiles.sum_by_expert(given.sum(dim=1), len(weight))
        return to_rows, to_weight, to_bias, None


def tile_count(rows: int, experts: int, height: int) -> int:
    """Return how many tiles are enough, however the rows are spread."""
    return (rows + experts * (height - 1)) // height if rows else 0


def tile_height(rows: int, experts: int) -> int:
    """Rows of a tile, a power of two near √(128 · rows per expert).

    On average half a tile of every expert is empty, m / 2a of the work at ``a`` rows per expert.
    Every tile copies its expert's weights once, 8 bytes for 2·m operations each: at a GPU's 3 TB/s
    and 50 TFLOP/s in fp32 that is 67 / m of the work. (By data sheets.)
    """
    wanted = math.sqrt(128 * max(1, rows) / experts)
    return max(_SMALLEST, min(_LARGEST, 1 << round(math.log2(wanted))))


def _make_tiles(rows: Tensor, offsets: Tensor) -> Tiles:
    return Tiles.of(offsets, len(rows), tile_height(len(rows), len(offsets)))

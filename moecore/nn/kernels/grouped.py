"""One linear map per expert, over rows that are sorted by expert.

On the meta device all functions return shapes and count the same operations as elsewhere. Where
grouped_mm does not take the tensors on CUDA, and in graphs compiled for CPU, rows are cut into
tiles of one expert each. No shape then depends on how rows are spread over experts: the host never
waits for the device, one batched product computes all tiles, and torch.compile gets one graph.

Products of fp32 stay in fp32, not in sums of bf16: grouped_mm rounds its output to bf16 (torch
2.13 refuses `out_dtype=torch.float32`, GroupedMMUtils.h), although it sums in fp32.

E experts, R rows, i inputs, o outputs, n tiles of m rows.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import gelu, grouped_mm
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moecore.core.torch_internals import GROUPED_MM
from moecore.nn.kernels.cpu_expert_loop import ExpertLoop

_MIN_TORCH = (2, 11)  # the first torch release that has grouped_mm on CPU
_ALIGNMENT = 16  # bytes, of every stride and of the start of the data
_MAX_EXPERTS = 1023  # for grouped_mm on CUDA; its error message states another number
_CACHED_ROWS = 1024  # rows that stay in a CPU's cache between two steps of a computation
_MAX_LOOPED_ROWS = 1024  # per expert, up to which a loop is faster than grouped_mm on CPU
_MAX_FUSED_ROWS = 2048  # per expert, up to which one pass over an MLP is faster in fp32

_MIN_HEIGHT, _MAX_HEIGHT = 8, 1024  # rows of a tile


class ExportTracingFlag:
    """True while tracing for export: experts get equally many rows, and autocast is not changed."""

    is_on = False


class ChosenKernels:
    """Triton's kernels for MLP experts, if $MOECORE_KERNELS chooses them in this process."""

    compute: Callable[..., Tensor] | None = None  # experts, tokens (B, T, d), plan → (B, T, d)
    device = "cuda"  # a CPU in Triton's interpreter


@contextmanager
def tracing_for_export() -> Iterator[None]:
    """Compute MoE layers by batched products inside, so that traced graphs take any batch size."""
    ExportTracingFlag.is_on = True
    try:
        yield
    finally:
        ExportTracingFlag.is_on = False


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    # rows: (R, i), sorted by expert. weight: (E, i, o). bias: (E, o) or None. offsets: (E,) int32,
    # where experts' rows end; the last must be R, as grouped_mm leaves rows past it uninitialised.
    # An expert without rows gets a gradient of zeros. On CUDA nothing waits for the device.
    rows = to_autocast(rows)
    if rows.is_meta:
        return torch.mm(rows, weight[0].to(rows.dtype))  # only the shape matters
    if ExportTracingFlag.is_on:
        products = rows.unflatten(0, (len(weight), -1)) @ to_autocast(weight)
        if bias is not None:
            products = products + to_autocast(bias).unsqueeze(1)
        return products.flatten(0, 1)
    looped = can_loop(rows)
    if looped and len(rows) <= _MAX_LOOPED_ROWS * len(weight):
        return ExpertLoop.apply(rows, offsets, weight, bias)[0]
    weight = to_autocast(weight)
    if bias is not None:
        bias = to_autocast(bias)
    if not can_group(rows, weight):
        if looped:
            return ExpertLoop.apply(rows, offsets, weight, bias)[0]
        added = None if bias is None else bias.to(rows.dtype)
        return TiledProduct.apply(rows, weight.to(rows.dtype), added, offsets)
    values = grouped_mm(rows.contiguous(), weight.contiguous(), offs=offsets)
    return _AddBias.apply(values, bias, offsets)


def grouped_mlp(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, offsets: Tensor
) -> Tensor:
    """Apply grouped_linear, GELU, grouped_linear to rows (R, d); on CPU in one pass over them."""
    # up: (E, d, h). up_bias: (E, h). down: (E, h, o). down_bias: (E, o). Returns (R, o).
    rows = to_autocast(rows)
    if can_loop(rows) and not ExportTracingFlag.is_on:
        if rows.dtype != torch.float32 or len(rows) <= _MAX_FUSED_ROWS * len(up):
            return ExpertLoop.apply(rows, offsets, up, up_bias, down, down_bias)[0]
    hidden = gelu(grouped_linear(rows, up, up_bias, offsets))
    return grouped_linear(hidden, down, down_bias, offsets)


def can_loop(rows: Tensor) -> bool:
    """Return whether experts can be looped over: on CPU, outside compiled graphs."""
    return rows.device.type == "cpu" and not torch.compiler.is_compiling()


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped_mm takes these (R, i) rows and (E, i, o) weights."""
    if not len(rows) or rows.dtype != weight.dtype or rows.device != weight.device:
        return False
    places = list(weight.shape[1:])
    if not torch.compiler.is_compiling():  # compiled tensors have no storage offset
        places += [rows.storage_offset(), weight.storage_offset()]
    # every row of both tensors must start at a multiple of 16 bytes
    if any(size * rows.element_size() % _ALIGNMENT for size in places):
        return False
    if rows.device.type == "cpu":
        if torch.compiler.is_compiling():  # grouped_mm's shape function refuses fp32
            return rows.dtype == torch.bfloat16
        is_available = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _MIN_TORCH
        return is_available and rows.dtype in (torch.float32, torch.bfloat16)
    # CUDA: bf16 from compute capability 9.0, up to 1,023 experts
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and len(weight) <= _MAX_EXPERTS
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


def experts_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each of ``rows`` rows, (R,) int32, without waiting for the device."""
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, numbers, right=True, out_int32=True)


def rows_at_once(rows: Tensor) -> int:
    """Return how many rows (R, d) to process at once: on CPU as many as fit the cache, else all."""
    if rows.device.type == "cpu":
        return _CACHED_ROWS
    return max(1, len(rows))


def to_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor to the autocast dtype if autocast is on: it does not handle grouped_mm."""
    device = tensor.device.type
    if tensor.is_meta:
        return tensor
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def full_precision(tensor: Tensor) -> AbstractContextManager:
    """Return a context without autocast on the tensor's device, except on meta and in export."""
    if tensor.is_meta or ExportTracingFlag.is_on:
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def register_flop_formulas() -> None:
    """Make torch.utils.flop_counter count grouped_mm; can be called repeatedly."""
    if GROUPED_MM not in flop_registry:
        # 2·R·i·o for (R, i) by (E, i, o), or for their gradient (i, R) by (R, o)
        register_flop_formula(GROUPED_MM)(
            lambda first, second, *_, **_options: 2 * first[-2] * first[-1] * second[-1]
        )


class _AddBias(Function):
    """Add rows' biases, if any, to values (R, o) in place: a second buffer costs page faults."""

    @staticmethod
    def forward(values: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        if bias is None:
            return values
        chunk = rows_at_once(values)
        experts_by_chunk = experts_of_rows(offsets, len(values)).split(chunk)
        for rows, experts in zip(values.split(chunk), experts_by_chunk, strict=True):
            rows.add_(bias.index_select(0, experts))
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad = grads[0].contiguous()  # grouped_mm refuses expanded ones
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        # The product with ones is an fp32 sum in a fixed order. Ones are as narrow as grouped_mm
        # allows. They are the second factor: torch.compile changes the layout of a transposed
        # constant, so that an expert's ones would lose their 16-byte alignment.
        ones = grad.new_ones(len(grad), _ALIGNMENT // grad.element_size())
        return grad, grouped_mm(grad.t(), ones, offs=ctx.saved_tensors[0])[:, :, 0], None


class Tiles(NamedTuple):
    """Which rows are in which tile; only the last tile of an expert can be partly empty."""

    experts: Tensor  # (n,) int64, ascending
    rows: Tensor  # (n·m,) the row at each place; 0 at empty places
    is_filled: Tensor  # (n·m, 1) bool, whether the place has a row
    places: Tensor  # (R,) the place of each row
    height: int  # m

    @classmethod
    def of(cls, offsets: Tensor, rows: int, height: int | None = None) -> "Tiles":
        """Cut ``rows`` rows into tiles; ``offsets`` (E,) are the ends of each expert's rows."""
        height = height or tile_height(rows, len(offsets))
        experts, first, ends = compute_tile_bounds(offsets, rows, height).unbind(1)
        row = first.unsqueeze(1) + torch.arange(height, device=offsets.device)
        is_filled = (row < ends.unsqueeze(1)).flatten()
        row = row.flatten().where(is_filled, rows)
        places = row.new_empty(rows + 1)  # the last one stands for all empty places
        places.scatter_(0, row, torch.arange(len(row), device=offsets.device))
        return cls(experts, row.where(is_filled, 0), is_filled.unsqueeze(1), places[:rows], height)

    def fill_tiles(self, values: Tensor) -> Tensor:
        """Copy values (R, w) into tiles (n, m, w), with zeros at empty places."""
        padded = values.index_select(0, self.rows).where(self.is_filled, 0)
        return padded.unflatten(0, (-1, self.height))

    def read_rows(self, tiles: Tensor) -> Tensor:
        """Return the rows (R, w) of tiles (n, m, w)."""
        return tiles.flatten(0, 1).index_select(0, self.places)

    def sum_by_expert(self, values: Tensor, experts: int) -> Tensor:
        """Sum tiles (n, …) per expert, (E, …), in a fixed order."""
        is_expert = torch.arange(experts, device=values.device).unsqueeze(1) == self.experts
        return (is_expert.to(values.dtype) @ values.flatten(1)).unflatten(1, values.shape[1:])


def compute_tile_bounds(offsets: Tensor, rows: int, height: int) -> Tensor:
    """Return each tile's expert, first row, and end of the expert's rows, (n, 3) int64."""
    ends = offsets.long()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    number = (sizes + height - 1).div(height, rounding_mode="floor")
    last = number.cumsum(0)
    tiles = torch.arange(max_tile_count(rows, len(ends), height), device=offsets.device)
    # Unused tiles at the end belong to the last expert and are empty: first ≥ end.
    expert = torch.searchsorted(last, tiles, right=True).clamp_(max=len(ends) - 1)
    first = (ends - sizes - (last - number) * height)[expert] + tiles * height
    return torch.stack([expert, first, ends[expert]], dim=1)


class TiledProduct(Function):
    """Compute grouped_linear by one batched product over tiles, in a single dtype."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        tiles = Tiles.of(offsets, len(rows))
        values = tiles.fill_tiles(rows)
        tile_weights = weight.index_select(0, tiles.experts)
        if bias is None:
            return tiles.read_rows(torch.bmm(values, tile_weights))
        tile_biases = bias.index_select(0, tiles.experts).unsqueeze(1)
        return tiles.read_rows(torch.baddbmm(tile_biases, values, tile_weights))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        rows, weight, bias, offsets = inputs
        ctx.save_for_backward(rows, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows, weight, offsets = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        tiles = Tiles.of(offsets, len(rows))
        tile_grads = tiles.fill_tiles(grad)
        to_rows = to_weight = to_bias = None
        if wants_rows:
            tile_weights = weight.index_select(0, tiles.experts)
            to_rows = tiles.read_rows(torch.bmm(tile_grads, tile_weights.mT))
        if wants_weight:
            products = torch.bmm(tiles.fill_tiles(rows).mT, tile_grads)
            to_weight = tiles.sum_by_expert(products, len(weight))
        if wants_bias:
            to_bias = tiles.sum_by_expert(tile_grads.sum(dim=1), len(weight))
        return to_rows, to_weight, to_bias, None


def max_tile_count(rows: int, experts: int, height: int) -> int:
    """Return how many tiles of ``height`` rows suffice for any spread of rows over experts."""
    return (rows + experts * (height - 1)) // height if rows else 0


def tile_height(rows: int, experts: int) -> int:
    """Return the rows per tile, a power of two near √(128 · rows per expert)."""
    # With ``a`` rows per expert, on average half a tile per expert is empty: m / 2a of the work.
    # Each tile copies its expert's weights once, 8 bytes per 2·m operations: at 3 TB/s and
    # 50 TFLOP/s in fp32 (a GPU's data sheet) that is 67 / m of the work.
    height = math.sqrt(128 * max(1, rows) / experts)
    return max(_MIN_HEIGHT, min(_MAX_HEIGHT, 1 << round(math.log2(height))))

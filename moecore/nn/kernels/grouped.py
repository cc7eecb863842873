"""One linear map per expert over rows that are sorted by expert.

E experts, R rows, i inputs, o outputs. On the meta device, where tensors have no values, all of it
gives shapes and costs what it would cost elsewhere.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import gelu, grouped_mm
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moecore.core.torch_internals import grouped_mm_operator
from moecore.nn.kernels.expert_loop import ExpertLoop, ExpertMlpLoop
from moecore.nn.kernels.grouped import TiledProduct

_CPU_SINCE = (2, 11)  # the first torch release that has grouped_mm on CPU
_ALIGNMENT = 16  # bytes, of every stride and of the start of the data
_MOST_GROUPS = 1023  # experts that grouped_mm takes on CUDA, whatever its error says
_CACHED_ROWS = 1024  # rows that stay in a CPU's cache between two steps of a computation
_LOOPED_ROWS = 1024  # rows per expert up to which a CPU is faster without grouped_mm
_FUSED_ROWS = 2048  # rows per expert up to which an MLP in fp32 is faster without it


class PlainOperationsFlag:
    """Whether a graph is traced that leaves torch: all experts then have as many rows, so that one
    batched product does, and no region without autocast is marked.
    """

    is_on = False


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Row r times the weight of its expert, plus that expert's bias.

    rows: (R, i), sorted by expert.  weight: (E, i, o).  bias: (E, o) or None.  offsets: (E,) int32,
    where each expert's rows end; the last is R, because grouped_mm leaves rows past it
    uninitialised.  Returns (R, o), in the autocast dtype where autocast is on.  An expert without
    rows gets a gradient of zeros.  Nothing waits for the device: where grouped_mm does not take the
    tensors (``can_group``) they are cut into tiles; on CPU, and only there, experts are looped
    over, in particular where they have few rows.
    """
    rows = to_autocast(rows)
    if rows.is_meta:
        return torch.mm(rows, weight[0].to(rows.dtype))  # every row sees one map, whichever
    if PlainOperationsFlag.is_on:
        products = rows.unflatten(0, (len(weight), -1)) @ to_autocast(weight)
        if bias is not None:
            products = products + to_autocast(bias).unsqueeze(1)
        return products.flatten(0, 1)
    looped = can_loop(rows)
    if looped and len(rows) <= _LOOPED_ROWS * len(weight):
        return ExpertLoop.apply(rows, weight, bias, offsets)
    weight = to_autocast(weight)
    if bias is not None:
        bias = to_autocast(bias)
    if not can_group(rows, weight):
        if looped:
            return ExpertLoop.apply(rows, weight, bias, offsets)
        added = None if bias is None else bias.to(rows.dtype)
        return TiledProduct.apply(rows, weight.to(rows.dtype), added, offsets)
    values = grouped_mm(rows.contiguous(), weight.contiguous(), offs=offsets)
    if bias is None:
        return _DenseGradient.apply(values)
    return _AddBias.apply(values, bias, offsets)


def grouped_mlp(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, offsets: Tensor
) -> Tensor:
    """grouped_linear to the hidden width, GELU, grouped_linear; on CPU in one pass over the rows.

    rows: (R, d).  up: (E, d, h).  up_bias: (E, h).  down: (E, h, o).  down_bias: (E, o).  Returns
    (R, o) in the autocast dtype.
    """
    rows = to_autocast(rows)
    if can_loop(rows) and not PlainOperationsFlag.is_on:
        if rows.dtype != torch.float32 or len(rows) <= _FUSED_ROWS * len(up):
            return ExpertMlpLoop.apply(rows, up, up_bias, down, down_bias, offsets)[0]
    hidden = gelu(grouped_linear(rows, up, up_bias, offsets))
    return grouped_linear(hidden, down, down_bias, offsets)


def can_loop(rows: Tensor) -> bool:
    """Return whether experts may be looped over: not on CUDA, nor in a compiled graph."""
    return rows.device.type == "cpu" and not torch.compiler.is_compiling()


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped_mm takes these (R, i) rows and (E, i, o) weights.

    CPU: fp32 and bf16 since torch 2.11. CUDA: bf16 from compute capability 9.0, for 1,023 experts
    at most. Rows must exist, and every row of both tensors must start at a multiple of 16 bytes.
    """
    if not len(rows) or rows.dtype != weight.dtype or rows.device != weight.device:
        return False
    places = list(weight.shape[1:])
    if not torch.compiler.is_compiling():  # there every tensor has a start of its own
        places += [rows.storage_offset(), weight.storage_offset()]
    if any(size * rows.element_size() % _ALIGNMENT for size in places):
        return False
    if rows.device.type == "cpu":
        if torch.compiler.is_compiling():  # the shape function of grouped_mm refuses fp32
            return rows.dtype == torch.bfloat16
        known = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _CPU_SINCE
        return known and rows.dtype in (torch.float32, torch.bfloat16)
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and len(weight) <= _MOST_GROUPS
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


def experts_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """The expert (R,) int32 of each row, without waiting for the device."""
    return torch.searchsorted(
        offsets,
        torch.arange(rows, dtype=offsets.dtype, device=offsets.device),
        right=True,
        out_int32=True,
    )


def rows_at_once(rows: Tensor) -> int:
    """Return how many of the (R, d) rows to take at a time: on CPU what its cache holds."""
    if rows.device.type == "cpu":
        return _CACHED_ROWS
    return max(1, len(rows))


def to_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the autocast dtype where autocast is on, as if it knew grouped_mm."""
    device = tensor.device.type
    if tensor.is_meta:
        return tensor
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def full_precision(tensor: Tensor) -> AbstractContextManager:
    """No autocast on the tensor's device; the meta device and graphs for others have none."""
    if tensor.is_meta or PlainOperationsFlag.is_on:
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def register_flop_formulas() -> None:
    """Let torch.utils.flop_counter see grouped_mm; twice does no harm."""
    operator = grouped_mm_operator()
    if operator not in flop_registry:
        register_flop_formula(operator)(_grouped_flops)


def _grouped_flops(
    left: tuple[int, ...], right: tuple[int, ...], *_args, out_shape: tuple[int, ...], **_kwargs
) -> int:
    """2·R·i·o for rows (R, i) by weights (E, i, o), or their gradient (i, R) by (R, o)."""
    return 2 * left[-2] * left[-1] * right[-1]


class _AddBias(Function):
    """values (R, o) plus each row's bias, in place: another buffer costs more in page faults.

    The bias's gradient is a grouped product with ones, a sum in fp32 in a fixed order.
    """

    @staticmethod
    def forward(values: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        chunk = rows_at_once(values)
        for rows, experts in zip(
            values.split(chunk), experts_of_rows(offsets, len(values)).split(chunk), strict=True
        ):
            rows.add_(bias.index_select(0, experts))
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        grad = grad.contiguous()
        # As narrow as grouped_mm takes. They are the second factor, since torch.compile lays a
        # transposed constant out anew: an expert's ones would begin at any byte, not at the 16th.
        ones = grad.new_ones(len(grad), _ALIGNMENT // grad.element_size())
        return grad, grouped_mm(grad.t(), ones, offs=ctx.saved_tensors[0])[:, :, 0], None


class _DenseGradient(Function):
    """The identity; its gradient is contiguous: grouped_mm refuses an expanded one."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad.contiguous()

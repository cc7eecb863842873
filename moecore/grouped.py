"""Floor 0: one linear map per expert over rows that are sorted by expert.

E experts, R rows, i inputs, o outputs.
"""

from itertools import compress

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import flop_registry, register_flop_formula

_CPU_SINCE = (2, 11)  # the first torch release that has grouped_mm on CPU
_ALIGNMENT = 16  # bytes, of every stride and of the start of the data
_CACHED_ROWS = 1024  # rows that stay in a CPU's cache between two steps of a computation
_LOOPED_ROWS = 1024  # rows per expert up to which a CPU is faster without grouped_mm


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Row r times the weight of its expert, plus that expert's bias.

    rows: (R, i), sorted by expert.  weight: (E, i, o).  bias: (E, o) or None.  offsets: (E,) int32, where each expert's rows
    end; the last is R, because grouped_mm leaves rows past it uninitialised.  Returns (R, o), in the autocast dtype where
    autocast is on.  An expert without rows gets a gradient of zeros.  Only the loop over experts waits for the device: it is
    used where grouped_mm does not take the tensors (``can_group``), and on CPU where experts have few rows.
    """
    rows = to_autocast(rows)
    if rows.device.type == "cpu" and len(rows) <= _LOOPED_ROWS * len(weight):
        return _ExpertLoop.apply(rows, weight, bias, offsets)
    weight, bias = to_autocast(weight), None if bias is None else to_autocast(bias)
    if not can_group(rows, weight):
        return _ExpertLoop.apply(rows, weight, bias, offsets)
    values = grouped_mm(rows.contiguous(), weight.contiguous(), offs=offsets)
    return _DenseGradient.apply(values) if bias is None else _AddBias.apply(values, bias, offsets)


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm takes these (R, i) rows and (E, i, o) weights; otherwise experts are looped over.

    CPU: fp32 and bf16 since torch 2.11. CUDA: bf16 from compute capability 9.0. Rows must exist, and every row of both
    tensors must start at a multiple of 16 bytes.
    """
    if not len(rows) or rows.dtype != weight.dtype or rows.device != weight.device:
        return False
    if any(size * rows.element_size() % _ALIGNMENT for size in (*weight.shape[1:], rows.storage_offset(), weight.storage_offset())):
        return False
    if rows.device.type == "cpu":
        return torch.__version__ >= _CPU_SINCE and rows.dtype in (torch.float32, torch.bfloat16)
    return rows.device.type == "cuda" and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (9, 0)


def experts_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """The expert (R,) int32 of each of ``rows`` rows; found on the device, without waiting for it."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype, device=offsets.device), right=True, out_int32=True)


def rows_at_once(rows: Tensor) -> int:
    """How many of the (R, d) rows to take through several steps before the next ones: on CPU what its cache holds, else all."""
    return _CACHED_ROWS if rows.device.type == "cpu" else max(1, len(rows))


def to_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the autocast dtype where autocast is on: what autocast would do if it knew grouped_mm. It leaves fp64 alone."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def register_flop_formulas() -> None:
    """Let torch.utils.flop_counter see grouped_mm, which it counts as nothing by itself. Calling it again does nothing."""
    if torch.ops.aten._grouped_mm not in flop_registry:
        register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_flops)


def _grouped_flops(left: tuple[int, ...], right: tuple[int, ...], *_args, out_shape: tuple[int, ...], **_kwargs) -> int:
    """2·R·i·o for rows (R, i) by weights (E, i, o), and for the weights' gradient (i, R) by (R, o)."""
    return 2 * left[-2] * left[-1] * right[-1]


class _ExpertLoop(Function):
    """grouped_linear one expert at a time, for rows in the dtype of the product and weights in any.

    A weight is cast just before its product and its gradient just after, while they are in the CPU's cache: with 128 experts
    of a ViT-S in bf16 a cast of all of them before (and of all gradients after) makes the layer a tenth slower.
    """

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        sizes, busy = _sizes(offsets)
        outputs, cast = rows.new_empty(len(rows), weight.shape[2]), _Cast(weight, rows.dtype)
        pieces = rows.split(busy), compress(weight.unbind(), sizes), outputs.split(busy)
        if bias is None:
            for part, w, output in zip(*pieces, strict=True):
                torch.mm(part, cast(w), out=output)
        else:
            for part, w, output, b in zip(*pieces, compress(bias.to(rows.dtype).unbind(), sizes), strict=True):
                torch.addmm(b, part, cast(w), out=output)
        return outputs

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        rows, weight, bias, offsets = inputs
        ctx.save_for_backward(rows, weight, offsets)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted too: plain operations, slower
            return *_loop_gradients(rows, weight, grad, offsets, ctx.bias), None
        (sizes, busy), grad = _sizes(offsets), grad.contiguous()
        parts, grads = rows.split(busy), grad.split(busy)
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            _rows_gradient(rows, weight, grads, sizes, busy) if wants_rows else None,
            _weight_gradient(weight, parts, grads, sizes) if wants_weight else None,
            _bias_gradient(grad.new_zeros(len(weight), grad.shape[1], dtype=ctx.bias), grads, sizes) if wants_bias else None,
            None,
        )


def _rows_gradient(rows: Tensor, weight: Tensor, grads: tuple[Tensor, ...], sizes: list[int], busy: list[int]) -> Tensor:
    gradient, cast = torch.empty_like(rows, memory_format=torch.contiguous_format), _Cast(weight, rows.dtype)
    for grad, w, output in zip(grads, compress(weight.unbind(), sizes), gradient.split(busy), strict=True):
        torch.mm(grad, cast(w).t(), out=output)
    return gradient


def _weight_gradient(weight: Tensor, parts: tuple[Tensor, ...], grads: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    room = _Cast(weight, grads[0].dtype).held if grads else None
    each = gradient.unbind()
    for output in compress(each, (not size for size in sizes)):
        output.zero_()
    for part, grad, output in zip(parts, grads, compress(each, sizes), strict=True):
        if len(part) == 1:  # at hundreds of experts most have one row, and the product of two vectors is cheaper so
            torch.mul(part.t(), grad, out=output)
        elif room is None:
            torch.mm(part.t(), grad, out=output)
        else:
            output.copy_(torch.mm(part.t(), grad, out=room))
    return gradient


def _bias_gradient(gradient: Tensor, grads: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    for grad, output in zip(grads, compress(gradient.unbind(), sizes), strict=True):
        output.copy_(grad.sum(dim=0))  # sums of bf16 are taken in fp32
    return gradient


class _Cast:
    """The weights (i, o) of one expert after the other in ``dtype``, always in the same buffer; as they are where they have it already."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.held = None if weight.dtype == dtype else weight.new_empty(weight.shape[1:], dtype=dtype)

    def __call__(self, weight: Tensor) -> Tensor:
        return weight if self.held is None else self.held.copy_(weight)


def _sizes(offsets: Tensor) -> tuple[list[int], list[int]]:
    """Every expert's number of rows, and those that are not 0."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return sizes, [size for size in sizes if size]


def _loop_gradients(rows: Tensor, weight: Tensor, grad: Tensor, offsets: Tensor, bias: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of rows, weight and bias by operations that have gradients themselves."""
    sizes, _ = _sizes(offsets)
    parts = list(zip(rows.split(sizes), weight.unbind(), grad.split(sizes), strict=True))
    to_rows = torch.cat([g @ w.to(g.dtype).t() for _, w, g in parts])
    to_weight = torch.stack([(part.t() @ g).to(weight.dtype) for part, _, g in parts])
    return to_rows, to_weight, None if bias is None else torch.stack([g.sum(dim=0).to(bias) for _, _, g in parts])


class _AddBias(Function):
    """values (R, o) plus each row's bias, in place: another buffer of that size costs more in page faults than the sum itself.

    The bias's gradient is a grouped product with ones, which sums in fp32 and always in the same order.
    """

    @staticmethod
    def forward(values: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        chunk = rows_at_once(values)
        for rows, experts in zip(values.split(chunk), experts_of_rows(offsets, len(values)).split(chunk), strict=True):
            rows.add_(bias.index_select(0, experts))
        return values

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = grad.contiguous()
        ones = grad.new_ones(len(grad), _ALIGNMENT // grad.element_size())  # as narrow as grouped_mm takes
        return grad, grouped_mm(ones.t(), grad, offs=ctx.saved_tensors[0])[:, 0], None


class _DenseGradient(Function):
    """The identity, whose gradient is contiguous: grouped_mm's backward refuses an expanded one (that of ``sum()``)."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.contiguous()

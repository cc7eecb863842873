"""One linear map per expert, one expert after the other: what grouped_mm does not take.

E experts, R rows, i inputs, o outputs.
"""

from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class ExpertLoop(Function):
    """grouped_linear one expert at a time, for rows in the dtype of the product and weights in any.

    A weight is cast just before its product and its gradient just after, while they are in the
    CPU's cache: with 128 experts of a ViT-S in bf16 a cast of all of them before (and of all
    gradients after) makes the layer a tenth slower.
    """

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        sizes, busy = _sizes(offsets)
        outputs = rows.new_empty(len(rows), weight.shape[2])
        cast = _Cast(weight, rows.dtype)
        pieces = rows.split(busy), compress(weight.unbind(), sizes), outputs.split(busy)
        if bias is None:
            for part, w, output in zip(*pieces, strict=True):
                torch.mm(part, cast(w), out=output)
        else:
            for part, w, output, b in zip(
                *pieces, compress(bias.to(rows.dtype).unbind(), sizes), strict=True
            ):
                torch.addmm(b, part, cast(w), out=output)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        rows, weight, bias, offsets = inputs
        ctx.save_for_backward(rows, weight, offsets)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows, weight, offsets = ctx.saved_tensors
        if torch.is_grad_enabled():
            # a gradient of this gradient is wanted too: plain operations, slower
            return *_loop_gradients(rows, weight, grad, offsets, ctx.bias), None
        sizes, busy = _sizes(offsets)
        grad = grad.contiguous()
        parts = rows.split(busy)
        grads = grad.split(busy)
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        to_rows = to_weight = to_bias = None
        if wants_rows:
            to_rows = _rows_gradient(rows, weight, grads, sizes, busy)
        if wants_weight:
            to_weight = _weight_gradient(weight, parts, grads, sizes)
        if wants_bias:
            empty = grad.new_zeros(len(weight), grad.shape[1], dtype=ctx.bias)
            to_bias = _bias_gradient(empty, grads, sizes)
        return to_rows, to_weight, to_bias, None


def _rows_gradient(
    rows: Tensor, weight: Tensor, grads: tuple[Tensor, ...], sizes: list[int], busy: list[int]
) -> Tensor:
    gradient = torch.empty_like(rows, memory_format=torch.contiguous_format)
    cast = _Cast(weight, rows.dtype)
    for grad, w, output in zip(
        grads, compress(weight.unbind(), sizes), gradient.split(busy), strict=True
    ):
        torch.mm(grad, cast(w).t(), out=output)
    return gradient


def _weight_gradient(
    weight: Tensor, parts: tuple[Tensor, ...], grads: tuple[Tensor, ...], sizes: list[int]
) -> Tensor:
    gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if grads:
        room = _Cast(weight, grads[0].dtype).held
    else:
        room = None
    each = gradient.unbind()
    for output in compress(each, (not size for size in sizes)):
        output.zero_()
    for part, grad, output in zip(parts, grads, compress(each, sizes), strict=True):
        if len(part) == 1:
            # at hundreds of experts most have one row: a product of two vectors is cheaper so
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
    """The weights (i, o) of one expert after the other in ``dtype``, always in the same buffer; as
    they are where they have it already.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        if weight.dtype == dtype:
            self.held = None
        else:
            self.held = weight.new_empty(weight.shape[1:], dtype=dtype)

    def __call__(self, weight: Tensor) -> Tensor:
        if self.held is None:
            return weight
        return self.held.copy_(weight)


def _sizes(offsets: Tensor) -> tuple[list[int], list[int]]:
    """Every expert's number of rows, and those that are not 0."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return sizes, [size for size in sizes if size]


def _loop_gradients(
    rows: Tensor, weight: Tensor, grad: Tensor, offsets: Tensor, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of rows, weight and bias by operations that have gradients themselves."""
    sizes, _ = _sizes(offsets)
    parts = list(zip(rows.split(sizes), weight.unbind(), grad.split(sizes), strict=True))
    to_rows = torch.cat([g @ w.to(g.dtype).t() for _, w, g in parts])
    to_weight = torch.stack([(part.t() @ g).to(weight.dtype) for part, _, g in parts])
    if bias is None:
        return to_rows, to_weight, None
    return to_rows, to_weight, torch.stack([g.sum(dim=0).to(bias) for _, _, g in parts])

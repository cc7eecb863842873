"""The linear maps, and the MLPs, of one expert or one group of experts after the other: what
grouped_mm does not take, and what is faster on CPU.

E experts, R rows, i inputs, h hidden width, o outputs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import gelu

from moecore.core.torch_internals import multiply_gelu_slope
from moecore.nn.kernels.expert_loop import ExpertGroup, ExpertGroups


class ExpertLoop(Function):
    """grouped_linear for rows in the dtype of the product and weights in any.

    A weight is cast just before its product and its gradient just after, while they are in the
    CPU's cache: with 128 experts of a ViT-S in bf16 a cast of all of them before (and of all
    gradients after) makes the layer a tenth slower.
    """

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        plan = ExpertGroups(offsets, weight)
        maps = _LinearMaps(weight, bias, _CastBuffer(rows.dtype))
        outputs = rows.new_empty(len(rows), weight.shape[2])
        with _no_autocast(rows):
            for group in plan.groups:
                part = plan.pad_rows(rows, group, weight.dtype)
                plan.unpad_rows(maps(part, group, plan.output_view(outputs, group)), group, outputs)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_gradients(_linear, ctx, grads[0])
        rows, weight, bias, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        plan = ExpertGroups(offsets, weight)
        maps = _LinearMaps(weight, bias, _CastBuffer(rows.dtype))
        to_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        gradients = _Gradients(maps, plan, wants_weight, wants_bias)
        with _no_autocast(rows):
            for group in plan.groups:
                part = plan.pad_rows(grad, group, weight.dtype)
                if wants_rows:
                    plan.unpad_rows(
                        maps.backward(part, group, plan.output_view(to_rows, group)), group, to_rows
                    )
                gradients.add(plan.pad_rows(rows, group, weight.dtype), part, group)
        return to_rows if wants_rows else None, gradients.weight, gradients.bias, None


class ExpertMlpLoop(Function):
    """Both maps of MLP experts with GELU (erf form) between them: all steps of a group while its
    rows are in the CPU's cache.

    Returns the outputs (R, o) and then, without gradients, what the backward pass needs of every
    group: its hidden values before and after GELU.
    """

    @staticmethod
    def forward(
        rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        plan = ExpertGroups(offsets, up)
        buffer = _CastBuffer(rows.dtype)
        first = _LinearMaps(up, up_bias, buffer)
        second = _LinearMaps(down, down_bias, buffer)
        outputs = rows.new_empty(len(rows), down.shape[2])
        kept = []
        with _no_autocast(rows):
            for group in plan.groups:
                inner = first(plan.pad_rows(rows, group, up.dtype), group, None)
                hidden = gelu(inner)
                plan.unpad_rows(
                    second(hidden, group, plan.output_view(outputs, group)), group, outputs
                )
                kept += [inner, hidden]
        return outputs, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        kept = output[1:]
        ctx.save_for_backward(*inputs, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # nobody wants the gradient of the outputs
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return _differentiable_gradients(_mlp, ctx, grads[0])
        rows, up, up_bias, down, down_bias, offsets, *kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_rows, wants_up, wants_up_bias, wants_down, wants_down_bias, _ = ctx.needs_input_grad
        plan = ExpertGroups(offsets, up)
        buffer = _CastBuffer(rows.dtype)
        first = _LinearMaps(up, up_bias, buffer)
        second = _LinearMaps(down, down_bias, buffer)
        to_first = _Gradients(first, plan, wants_up, wants_up_bias)
        to_second = _Gradients(second, plan, wants_down, wants_down_bias)
        to_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        with _no_autocast(rows):
            for group, inner, hidden in zip(plan.groups, kept[::2], kept[1::2], strict=True):
                part = plan.pad_rows(grad, group, up.dtype)
                to_second.add(hidden, part, group)
                to_inner = second.backward(part, group, None)
                multiply_gelu_slope(to_inner, inner)
                to_first.add(plan.pad_rows(rows, group, up.dtype), to_inner, group)
                if wants_rows:
                    place = plan.output_view(to_rows, group)
                    plan.unpad_rows(first.backward(to_inner, group, place), group, to_rows)
        if not wants_rows:
            to_rows = None
        return to_rows, to_first.weight, to_first.bias, to_second.weight, to_second.bias, None


class _CastBuffer:
    """One buffer for the weights and gradients of all groups: two would overflow a core's cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._held: Tensor | None = None

    def __call__(self, like: Tensor) -> Tensor:
        if self._held is None or self._held.numel() < like.numel():
            self._held = like.new_empty(like.numel(), dtype=self.dtype)
        return self._held[: like.numel()].view(like.shape)


class _LinearMaps:
    """The linear maps of all experts, in the dtype of the product that is asked for."""

    def __init__(self, weight: Tensor, bias: Tensor | None, buffer: _CastBuffer) -> None:
        self.weight = weight
        self.bias = bias
        self.buffer = buffer
        if bias is not None:
            self.rounded = bias.to(buffer.dtype)

    def __call__(self, rows: Tensor, group: ExpertGroup, into: Tensor | None) -> Tensor:
        """The rows' outputs: (S, o) of one expert, or (experts, S, o)."""
        weight = self._in(rows.dtype, group)
        if self.bias is None:
            return _product(rows, weight, into)
        bias = self.bias if self.bias.dtype == rows.dtype else self.rounded
        if group.alone:
            return torch.addmm(bias[group.experts], rows, weight, out=into)
        return torch.bmm(rows, weight).add_(bias[group.experts].unsqueeze(1))

    def backward(self, grad: Tensor, group: ExpertGroup, into: Tensor | None) -> Tensor:
        """The rows' gradient from that of their outputs, in the same way."""
        return _product(grad, self._in(grad.dtype, group).mT, into)

    def _in(self, dtype: torch.dtype, group: ExpertGroup) -> Tensor:
        weight = self.weight[group.experts]
        if weight.dtype == dtype:
            return weight
        return self.buffer(weight).copy_(weight)


class _Gradients:
    """The gradients of the weights and biases of all experts, None where nobody wants them."""

    def __init__(self, maps: _LinearMaps, plan: ExpertGroups, weight: bool, bias: bool) -> None:
        self.maps = maps
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if weight:
            self.weight = torch.empty_like(maps.weight, memory_format=torch.contiguous_format)
            for expert in plan.idle:
                self.weight[expert].zero_()
        if bias and maps.bias is not None:
            self.bias = torch.zeros_like(maps.bias)

    def add(self, rows: Tensor, grad: Tensor, group: ExpertGroup) -> None:
        """Add what the group's rows and the gradient of their outputs give."""
        if self.weight is not None:
            into = self.weight[group.experts]
            if group.slots == 1:
                # a product of two vectors is cheaper so
                torch.mul(rows.mT, grad, out=into)
            elif into.dtype == grad.dtype:
                _product(rows.mT, grad, into)
            else:
                into.copy_(_product(rows.mT, grad, self.maps.buffer(into)))
        if self.bias is not None:
            self.bias[group.experts] = grad.sum(dim=-2)  # sums of bf16 are taken in fp32


def _product(left: Tensor, right: Tensor, into: Tensor | None) -> Tensor:
    if left.dim() == 2:
        return torch.mm(left, right, out=into)
    return torch.bmm(left, right, out=into)


def _no_autocast(rows: Tensor) -> AbstractContextManager:
    return torch.autocast(rows.device.type, enabled=False)


def _differentiable_gradients(
    plain: Callable[..., Tensor], ctx: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """A Function's gradients by ``plain``, which has second derivatives too; slower."""
    inputs = ctx.saved_tensors[: len(ctx.needs_input_grad)]
    wanted = [tensor for tensor, wants in zip(inputs, ctx.needs_input_grad, strict=True) if wants]
    with _no_autocast(grad):
        gradients = iter(torch.autograd.grad(plain(*inputs), wanted, grad, create_graph=True))
    return tuple(next(gradients) if wants else None for wants in ctx.needs_input_grad)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    products = [
        part @ w.to(part.dtype) for part, w in zip(rows.split(sizes), weight.unbind(), strict=True)
    ]
    if bias is not None:
        added = bias.to(rows.dtype).unbind()
        products = [product + b for product, b in zip(products, added, strict=True)]
    return torch.cat(products)


def _mlp(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, offsets: Tensor
) -> Tensor:
    return _linear(gelu(_linear(rows, up, up_bias, offsets)), down, down_bias, offsets)

"""Linear maps and MLPs of experts, computed one expert or one group of experts at a time.

With hundreds of experts of one or two rows each, a loop spends most of its time between products.
So consecutive experts with few rows form a group: each gets S slots, S the largest row count in the
group, free slots are zero, and one batched product computes the group (``benchmarks/crossover.py``
prints where that is faster).

E experts, R rows, i inputs, h hidden width, o outputs, n columns.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp
from torch.nn.functional import gelu

from moecore.core.torch_internals import active_transform_names, multiply_gelu_slope_in_place

MIN_EXPERTS_TO_GROUP = 64  # with fewer experts, a loop over single experts costs little
MAX_GROUPED_SLOTS = 128  # per expert; above, a group is slower than single experts
MIN_GROUPED_EXPERTS = 8  # with more than MAX_MEMORY_BOUND_SLOTS slots: larger experts use all cores
# Up to here a product is bound by reading its weights, and casting them to bf16 costs more.
MAX_MEMORY_BOUND_SLOTS = 32
MAX_GROUP_WEIGHT_ENTRIES = 3 << 20  # entries of a group's weights; in bf16 they fit an L3 cache


class ExpertGroup(NamedTuple):
    """Experts that share one batched product, or a single expert (an int)."""

    experts: int | slice
    rows: slice
    slots: int  # per expert

    @property
    def is_single(self) -> bool:
        return isinstance(self.experts, int)


# Multiplies a group's rows by its experts' weights; writes to the last argument unless it is None
Product = Callable[[Tensor, ExpertGroup, Tensor | None], Tensor]


class ExpertGroups:
    """Splits experts into ``groups``, in order; ``idle`` experts, without rows, are in no group."""

    def __init__(self, offsets: Tensor, weight: Tensor) -> None:
        ends = [0, *offsets.tolist()]
        self.sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        self.groups: list[ExpertGroup] = []
        self.idle: list[int] = []
        shifts = [0] * len(self.sizes)  # a row's index + its expert's shift = its slot in the group
        group_size = 1
        if offsets.device.type == "cpu" and len(self.sizes) >= MIN_EXPERTS_TO_GROUP:
            group_size = max(1, MAX_GROUP_WEIGHT_ENTRIES // max(1, weight[0].numel()))
        for first in range(0, len(self.sizes), group_size):
            sizes = self.sizes[first : first + group_size]
            slots = max(sizes)
            if group_size > 1 and _are_batched_together(sizes, group_size):
                last = first + len(sizes)
                rows = slice(ends[first], ends[last])
                self.groups.append(ExpertGroup(slice(first, last), rows, slots))
                for expert in range(first, last):
                    shifts[expert] = (expert - first) * slots - ends[expert]
                continue
            for expert, size in enumerate(sizes, start=first):
                if size:
                    rows = slice(ends[expert], ends[expert + 1])
                    self.groups.append(ExpertGroup(expert, rows, size))
                else:
                    self.idle.append(expert)
        if group_size > 1:
            row_shifts = torch.tensor(shifts).repeat_interleave(torch.tensor(self.sizes))
            self.slots = row_shifts + torch.arange(ends[-1])

    def pad_rows(self, rows: Tensor, group: ExpertGroup, dtype: torch.dtype) -> Tensor:
        """Return a group's rows: (S, n) of one expert, else (experts, S slots, n), padded by 0."""
        part = rows[group.rows]
        if isinstance(group.experts, int):
            return part
        if group.slots <= MAX_MEMORY_BOUND_SLOTS:
            part = part.to(dtype)
        number = group.experts.stop - group.experts.start
        padded = part.new_zeros(number * group.slots, part.shape[1])
        padded.index_copy_(0, self.slots[group.rows], part)
        return padded.view(number, group.slots, -1)

    def fill_rows(self, product: Product, part: Tensor, group: ExpertGroup, rows: Tensor) -> None:
        """Write ``product`` of a group's padded rows, ``part``, into ``rows``, without padding."""
        if group.is_single:
            product(part, group, rows[group.rows])
        else:
            padded = product(part, group, None)
            rows[group.rows].copy_(padded.flatten(0, 1).index_select(0, self.slots[group.rows]))


def _are_batched_together(sizes: list[int], group_size: int) -> bool:
    """Return whether experts with these row counts are computed as one group of ``group_size``."""
    slots = max(sizes)
    if slots <= MAX_MEMORY_BOUND_SLOTS:
        # Bound by reading weights: free slots cost nothing, but a group also reads the weights of
        # experts without rows. So at least a third must have rows.
        return 3 * sum(size > 0 for size in sizes) >= len(sizes)
    # Bound by arithmetic: free slots cost as much as filled ones.
    is_half_full = 2 * sum(sizes) >= len(sizes) * slots
    return group_size >= MIN_GROUPED_EXPERTS and slots <= MAX_GROUPED_SLOTS and is_half_full


class ExpertLoop(Function):
    """Compute each expert's linear map, or its MLP with GELU (erf form): two maps, in one pass.

    Returns outputs (R, o) and what backward needs. Rows are in the product's dtype, parameters
    (weight, bias of the first map, then of the second) in any dtype.
    """

    # Weights are cast just before a product and their gradients just after, while they are in
    # cache. With 128 experts of a ViT-S in bf16, casting all at once makes the layer 10 % slower.

    @staticmethod
    def forward(rows: Tensor, offsets: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        plan, maps, dtype = _build_groups_and_maps(rows, offsets, parameters)
        outputs = rows.new_empty(len(rows), maps[-1].weight.shape[2])
        saved = []
        with _no_autocast(rows):
            for group in plan.groups:
                values = plan.pad_rows(rows, group, dtype)
                if len(maps) == 2:
                    inner = maps[0](values, group, None)
                    values = gelu(inner)  # at once, while the group's rows are in the CPU's cache
                    saved += [inner, values]
                plan.fill_rows(maps[-1], values, group, outputs)
        return outputs, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        saved = output[1:]
        ctx.save_for_backward(*inputs, *saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        if grads[0] is None:  # the outputs have no gradient
            return (None,) * count
        if torch.is_grad_enabled() or active_transform_names():
            return _differentiable_gradients(ctx, grads[0])
        tensors = ctx.saved_tensors  # read once: recomputed activations are given out once
        (rows, offsets, *parameters), saved = tensors[:count], tensors[count:]
        grad = grads[0].contiguous()
        wants_rows, _, *needed = ctx.needs_input_grad
        plan, maps, dtype = _build_groups_and_maps(rows, offsets, parameters)
        pairs = zip(maps, needed[::2], needed[1::2], strict=True)
        gradients = [_Gradients(linear, plan, *wants) for linear, *wants in pairs]
        to_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        with _no_autocast(rows):
            for place, group in enumerate(plan.groups):
                part = plan.pad_rows(grad, group, dtype)
                if len(maps) == 2:
                    inner, hidden = saved[2 * place : 2 * place + 2]
                    gradients[1].add(hidden, part, group)
                    part = maps[1].backward(part, group, None)
                    multiply_gelu_slope_in_place(part, inner)
                gradients[0].add(plan.pad_rows(rows, group, dtype), part, group)
                if wants_rows:
                    plan.fill_rows(maps[0].backward, part, group, to_rows)
        by_parameter = [value for part in gradients for value in (part.weight, part.bias)]
        return to_rows if wants_rows else None, None, *by_parameter


def _build_groups_and_maps(
    rows: Tensor, offsets: Tensor, parameters: Sequence[Tensor | None]
) -> tuple[ExpertGroups, list["_LinearByExpert"], torch.dtype]:
    """Return the groups of experts, their one or two linear maps, and the weights' dtype."""
    weights: Any = parameters[::2]
    buffer = _CastBuffer(rows.dtype)
    maps = [_LinearByExpert(*pair, buffer) for pair in zip(weights, parameters[1::2], strict=True)]
    return ExpertGroups(offsets, weights[0]), maps, weights[0].dtype


class _CastBuffer:
    """Memory that all groups reuse to cast weights and gradients; two would overflow the cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory: Tensor | None = None

    def __call__(self, like: Tensor) -> Tensor:
        if self._memory is None or self._memory.numel() < like.numel():
            self._memory = like.new_empty(like.numel(), dtype=self.dtype)
        return self._memory[: like.numel()].view(like.shape)


class _LinearByExpert:
    """The linear maps of all experts, in the dtype of ``buffer``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, buffer: _CastBuffer) -> None:
        self.weight = weight
        self.bias = bias
        self.buffer = buffer
        if bias is not None:
            self.rounded = bias.to(buffer.dtype)

    def __call__(self, rows: Tensor, group: ExpertGroup, into: Tensor | None) -> Tensor:
        """Return a group's outputs: (S, o) of one expert, (experts, S, o) of several."""
        weight = self._cast_weight(rows.dtype, group)
        if self.bias is None:
            return _mm_or_bmm(rows, weight, into)
        bias = self.bias if self.bias.dtype == rows.dtype else self.rounded
        if group.is_single:
            return torch.addmm(bias[group.experts], rows, weight, out=into)
        return torch.bmm(rows, weight).add_(bias[group.experts].unsqueeze(1))

    def backward(self, grad: Tensor, group: ExpertGroup, into: Tensor | None) -> Tensor:
        """Return the gradient of a group's rows from the gradient of their outputs."""
        return _mm_or_bmm(grad, self._cast_weight(grad.dtype, group).mT, into)

    def _cast_weight(self, dtype: torch.dtype, group: ExpertGroup) -> Tensor:
        weight = self.weight[group.experts]
        if weight.dtype == dtype:
            return weight
        return self.buffer(weight).copy_(weight)


class _Gradients:
    """The gradients of all experts' weights and biases; None where not required."""

    def __init__(self, maps: _LinearByExpert, plan: ExpertGroups, weight: bool, bias: bool) -> None:
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
        """Store a group's gradients, from its rows and the gradient of their outputs."""
        if self.weight is not None:
            into = self.weight[group.experts]
            if group.slots == 1:
                # faster than mm for the product of two vectors
                torch.mul(rows.mT, grad, out=into)
            elif into.dtype == grad.dtype:
                _mm_or_bmm(rows.mT, grad, into)
            else:
                into.copy_(_mm_or_bmm(rows.mT, grad, self.maps.buffer(into)))
        if self.bias is not None:
            self.bias[group.experts] = grad.sum(dim=-2)  # bf16 is summed in fp32


def _mm_or_bmm(first: Tensor, second: Tensor, into: Tensor | None) -> Tensor:
    if first.dim() == 2:
        return torch.mm(first, second, out=into)
    return torch.bmm(first, second, out=into)


def _no_autocast(rows: Tensor) -> AbstractContextManager:
    return torch.autocast(rows.device.type, enabled=False)


def _differentiable_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return gradients by autograd through ``_apply_plainly``: slow, but differentiable."""
    inputs = list(ctx.saved_tensors[: len(ctx.needs_input_grad)])
    differentiated = [index for index, needs in enumerate(ctx.needs_input_grad) if needs]

    def compute_outputs(*tensors: Tensor) -> Tensor:
        for index, tensor in zip(differentiated, tensors, strict=True):
            inputs[index] = tensor
        return _apply_plainly(*inputs)

    with _no_autocast(grad), torch.enable_grad():
        # After torch.func.vjp the saved tensors are not those of a graph.
        pull_back = vjp(compute_outputs, *(inputs[index] for index in differentiated))[1]
        gradients = iter(pull_back(grad))
    return tuple(next(gradients) if wants else None for wants in ctx.needs_input_grad)


def _apply_plainly(rows: Tensor, offsets: Tensor, *parameters: Any) -> Tensor:
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    for place in range(0, len(parameters), 2):
        if place:
            rows = gelu(rows)
        weight, bias = parameters[place : place + 2]
        parts = zip(rows.split(sizes), weight, strict=True)
        products = [part @ each.to(part.dtype) for part, each in parts]
        if bias is not None:
            biases = bias.to(rows.dtype).unbind()
            products = [product + each for product, each in zip(products, biases, strict=True)]
        rows = torch.cat(products)
    return rows

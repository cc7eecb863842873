"""What the losses on a layer's routing share: sums over data-parallel ranks and over layers."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord, Step


def total_over_ranks(values: Tensor) -> Tensor:
    """The sum of ``values`` over data-parallel ranks, with gradient: the balance losses are not
    linear in their statistics.

    Every rank then holds the same loss, and its gradient arrives times the number of ranks, which
    DDP's mean takes out again.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    return _AllReduce.apply(values)


def sum_over_layers(step: Step, loss: Callable[[RoutingRecord], Tensor]) -> Tensor:
    """The sum of ``loss(record)`` over MoE layers; a model without any is a UserError."""
    if not step.output.routing:
        mend = "give the method a router and experts, or remove its regularizers"
        raise UserError(f"regularizers: the model has no MoE layer to regularize; {mend}")
    return cast(Tensor, sum(loss(record) for record in step.output.routing))


class _AllReduce(Function):
    """The sum over ranks; its gradient is summed over ranks too (torch.distributed.nn's own is
    deprecated).
    """

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return _AllReduce.apply(*grads)

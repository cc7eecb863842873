"""Experts that lie on several ranks: rows travel to their experts and their outputs come back.

n ranks of a group hold E / n whole experts each, in their order. Between dispatch and combine each
rank sends its rows to the ranks of their experts. R rows of this rank, d width.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import ExpertsModule


class ShardedExperts:
    """What an ``MoEFeedForward`` calls in place of its experts, whose parameters (E, …) are sharded
    by expert over the last dimension of ``mesh`` (replicate, shard).

    The gradient of a parameter is the mean over all ranks of what each one's tokens give, as it
    would be without any of this; so nobody averages it again.
    """

    def __init__(self, experts: ExpertsModule, mesh: DeviceMesh) -> None:
        self.experts = experts
        self.group = mesh.get_group(mesh.ndim - 1)
        self.copies = mesh.get_group(0)
        self.ranks = mesh.size()

    def lent_basis(self) -> Tensor | None:
        """The bases (E, d, r) of all experts, gathered; None where they have none."""
        if self.experts.lent_basis() is None:
            return None
        return _AllGather.apply(self._own("basis"), self.group)

    def __call__(self, rows: Rows) -> Tensor:
        """Rows (R, d) to outputs (R, d), in the same order; waits once for the device."""
        sizes = rows.offsets.diff(prepend=rows.offsets.new_zeros(1))
        mine = sizes.view(distributed.get_world_size(self.group), -1).contiguous()
        theirs = torch.empty_like(mine)
        distributed.all_to_all_single(theirs, mine, group=self.group)
        sent, got = torch.stack([mine.sum(dim=1), theirs.sum(dim=1)]).tolist()
        values = _Exchange.apply(rows.values, sent, got, self.group)
        to_expert, back = rank_to_expert_permutation(theirs, sum(got))
        ends = theirs.sum(dim=0).cumsum(dim=0).int()
        own = Rows(_Permute.apply(values, to_expert, back), ends, rows.projected)
        names = [name for name, _ in self.experts.named_parameters()]
        parameters = {name: self._own(name) for name in names}
        outputs = functional_call(self.experts, parameters, (own,))
        return _Exchange.apply(_Permute.apply(outputs, back, to_expert), got, sent, self.group)

    def _own(self, name: str) -> Tensor:
        """This rank's experts' part of a parameter."""
        parameter: Any = self.experts.get_parameter(name)
        return _AverageGradient.apply(parameter.to_local(), self.copies, self.ranks)


def rank_to_expert_permutation(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows that came rank by rank, of each rank expert by expert, in the order of experts.

    sizes: (n, E / n), how many came from each rank for each expert; ``rows`` in all. Returns the
    row of each place and the place of each row, (rows,) int64. Of an expert, those of the first
    rank come first: the order of the whole batch.
    """
    experts = torch.arange(sizes.shape[1], device=sizes.device).expand_as(sizes).flatten()
    of_row = experts.repeat_interleave(sizes.flatten(), output_size=rows)
    order = of_row.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    return order, back


class _Exchange(Function):
    """Rows (sum of sent, d), in the order of the ranks they go to, to those that came (sum of got,
    d), in the order of the ranks they come from. Gradients go the same way back.
    """

    @staticmethod
    def forward(rows: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
        came = rows.new_empty(sum(got), rows.shape[1])
        distributed.all_to_all_single(came, rows.contiguous(), got, sent, group=group)
        return came

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, *ctx.way = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got, group = ctx.way
        return _Exchange.apply(grads[0], got, sent, group), None, None, None


class _Permute(Function):
    """Rows in another order; the gradient is gathered too."""

    @staticmethod
    def forward(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        return rows.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _Permute.apply(grads[0], back, order), None, None


class _AverageGradient(Function):
    """A parameter's own part. Its gradient, which is of the tokens of this group's ranks, is summed
    over the groups that hold the same experts and divided by the number of ranks.
    """

    @staticmethod
    def forward(part: Tensor, copies: ProcessGroup, ranks: int) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, ctx.copies, ctx.ranks = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.copies)
        return total.div_(ctx.ranks), None, None


class _AllGather(Function):
    """Parts (E / n, …) of all ranks in order; gradients are summed over the ranks."""

    @staticmethod
    def forward(part: Tensor, group: ProcessGroup) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        parts = list(grad.contiguous().chunk(distributed.get_world_size(ctx.group)))
        part = torch.empty_like(parts[0])
        distributed.reduce_scatter(part, parts, group=ctx.group)
        return part, None

"""Expert parallelism: each of n ranks holds E / n experts, and tokens are sent to them."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from moecore.nn.dispatch import GatherTokens, Rows
from moecore.nn.experts.base import ExpertsModule


# Parameters are sharded by expert over the last dimension of ``mesh`` (replicate, shard). Their
# gradient is already the mean over all ranks: do not average it again.
class ShardedExperts:
    """Replaces the experts of an ``MoEFeedForward`` by experts sharded over ranks."""

    def __init__(self, experts: ExpertsModule, mesh: DeviceMesh) -> None:
        self.experts = experts
        self.group = mesh.get_group(mesh.ndim - 1)
        self.copies = mesh.get_group(0)
        self.ranks = mesh.size()

    def lent_basis(self) -> Tensor | None:
        """Return the bases (E, d, r) of all experts, gathered; None for experts without bases."""
        if self.experts.lent_basis() is None:
            return None
        return _AllGather.apply(self._local_part("basis"), self.group)

    def __call__(self, rows: Rows) -> Tensor:
        """Return outputs (R, d) of rows (R, d), in their order; the host waits once for the GPU."""
        sizes = rows.offsets.diff(prepend=rows.offsets.new_zeros(1))
        sizes_sent = sizes.view(distributed.get_world_size(self.group), -1).contiguous()
        sizes_received = torch.empty_like(sizes_sent)
        distributed.all_to_all_single(sizes_received, sizes_sent, group=self.group)
        sent, received = torch.stack([sizes_sent.sum(dim=1), sizes_received.sum(dim=1)]).tolist()
        values = _Exchange.apply(rows.values, sent, received, self.group)
        to_expert, inverse = rank_to_expert_permutation(sizes_received, sum(received))
        ends = sizes_received.sum(dim=0).cumsum(dim=0).int()
        local_rows = Rows(GatherTokens.apply(values, to_expert, inverse, 1), ends, rows.projected)
        names = [name for name, _ in self.experts.named_parameters()]
        parameters = {name: self._local_part(name) for name in names}
        outputs = functional_call(self.experts, parameters, (local_rows,))
        by_rank = GatherTokens.apply(outputs, inverse, to_expert, 1)
        return _Exchange.apply(by_rank, received, sent, self.group)

    def _local_part(self, name: str) -> Tensor:
        """Return the part of a parameter that belongs to this rank's experts."""
        parameter: Any = self.experts.get_parameter(name)
        return _AverageGradient.apply(parameter.to_local(), self.copies, self.ranks)


def rank_to_expert_permutation(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation (rows,) int64 that sorts received rows by expert, and its inverse."""
    # sizes: (n, E / n), rows received from each rank for each expert. Rows arrive sorted by rank,
    # then by expert. Of one expert, the first rank's rows come first: the order of the whole batch.
    experts = torch.arange(sizes.shape[1], device=sizes.device).expand_as(sizes).flatten()
    order = experts.repeat_interleave(sizes.flatten(), output_size=rows).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    return order, inverse


class _Exchange(Function):
    """Send rows, ordered by rank, and return the received rows, ordered by rank."""

    @staticmethod
    def forward(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        output = rows.new_empty(sum(received), rows.shape[1])
        distributed.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, *ctx.route = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.route
        return _Exchange.apply(grads[0], received, sent, group), None, None, None


class _AverageGradient(Function):
    """Return a parameter's local part; its gradient is averaged over all ranks."""

    @staticmethod
    def forward(part: Tensor, copies: ProcessGroup, ranks: int) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, ctx.copies, ctx.ranks = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # the gradient is of this group's tokens; ``copies``: all ranks that hold the same experts
        total = grads[0].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.copies)
        return total.div_(ctx.ranks), None, None


class _AllGather(Function):
    """Concatenate the parts (E / n, …) of all ranks; gradients are summed over the ranks."""

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
        parts = list(grads[0].contiguous().chunk(distributed.get_world_size(ctx.group)))
        part = torch.empty_like(parts[0])
        distributed.reduce_scatter(part, parts, group=ctx.group)
        return part, None

"""MoE layers in plain operations, for graphs that leave torch: every expert computes every token.

B images, T tokens per image, E experts, d width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows, SparsePlan, dense_rows
from moecore.nn.kernels.grouped import PlainOperations
from moecore.nn.layers.moe import MoEFeedForward, apply_experts
from moecore.nn.routers.projection_plan import ProjectionDispatchPlan


@contextmanager
def compute_plainly(model: nn.Module) -> Iterator[None]:
    """Let the MoE layers of ``model`` give, inside, the same numbers by batched products alone.

    No row is sorted or counted, so a graph that is traced here holds for batches of any size.
    """
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    for layer in layers:
        layer.forward = partial(_forward_plainly, layer)
    PlainOperations.is_on = True
    try:
        yield
    finally:
        PlainOperations.is_on = False
        for layer in layers:
            del layer.forward


def _forward_plainly(
    layer: MoEFeedForward, tokens: Tensor, context: RoutingContext = RoutingContext()
) -> tuple[Tensor, tuple[RoutingRecord]]:
    """What ``MoEFeedForward.forward`` returns."""
    if layer.shares_basis:
        context = context._replace(basis=layer.experts.lent_basis())
    plan, record = layer.router(tokens, context)
    if isinstance(plan, SparsePlan | ProjectionDispatchPlan):
        output = _weigh_all_experts(layer.experts, tokens, record.combine)
    else:  # no token chooses, so all experts have as many rows
        output = plan.combine(apply_experts(layer.experts, plan.dispatch(tokens)))
    if layer.shared is not None:
        output = output + layer.shared(dense_rows(tokens)).view_as(output)
    return output, (record,)


def _weigh_all_experts(experts: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
    """The sum of all experts' outputs for tokens (B, T, d), times weights (B, T, E)."""
    number = weights.shape[-1]
    values = tokens.flatten(0, 1)
    ends = torch.arange(1, number + 1, dtype=torch.int32, device=tokens.device) * len(values)
    outputs = experts(Rows(values.repeat(number, 1), ends)).view(number, *tokens.shape)
    return (outputs * weights.movedim(-1, 0).unsqueeze(-1)).sum(dim=0)

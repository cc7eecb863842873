"""Export MoE layers as plain operations: every expert computes every token.

B images, T tokens per image, E experts, width d.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.core.routing_records import RoutingRecord
from moecore.nn.dispatch import ProjectionDispatchPlan, Rows, SparsePlan
from moecore.nn.experts.base import ExpertsModule
from moecore.nn.kernels.grouped import PlainOperationsFlag
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.depth import DepthPlan

TokenChoice = SparsePlan | ProjectionDispatchPlan | DepthPlan


@contextmanager
def exportable_moe_layers(model: nn.Module) -> Iterator[None]:
    """Compute MoE layers by batched products, so that traced graphs take any batch size."""
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    for layer in layers:
        layer.compute_networks = partial(_compute_networks_plainly, layer)
    PlainOperationsFlag.is_on = True
    try:
        yield
    finally:
        PlainOperationsFlag.is_on = False
        for layer in layers:
            del layer.compute_networks


def _compute_networks_plainly(
    layer: MoEFeedForward, experts: ExpertsModule, tokens: Tensor, plan: Any, record: RoutingRecord
) -> Tensor:
    if not isinstance(plan, TokenChoice):  # all experts have equally many rows
        return MoEFeedForward.compute_networks(layer, experts, tokens, plan, record)
    number = layer.number
    values = tokens.flatten(0, 1)
    ends = torch.arange(1, number + 1, dtype=torch.int32, device=tokens.device) * len(values)
    outputs = experts(Rows(values.repeat(number, 1), ends)).view(number, *tokens.shape)
    weights = record.combine[..., :number].movedim(-1, 0)
    return (outputs * weights.unsqueeze(-1)).sum(dim=0)

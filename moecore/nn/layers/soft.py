"""A model whose experts all work on all tokens: a smooth stand-in, to see whether the hard choice
hides gradients from an attack.

B images, T tokens per image, E experts, d width.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from moecore.core.records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import SparsePlan
from moecore.nn.layers.moe import MoELayer
from moecore.nn.routers.soft_slots import SlotsPlan


def softened(model: nn.Module) -> nn.Module:
    """The same model (sharing parameters and buffers) where a layer is Σ_e probs_e · expert_e(x).

    Equal to the true model where all experts are chosen with their probs as weights (noisy top-k at
    k = E). Soft slots stay: every expert already sees every token.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, shared)
    for layer in [module for module in copy.modules() if isinstance(module, MoELayer)]:
        layer.router = AllExperts(layer.router)
    return copy


class AllExperts(nn.Module):
    """``router(tokens, context)`` with tokens (B, T, d): every token goes to all experts, weighted
    by the probs of the ``router`` inside.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan | SlotsPlan, RoutingRecord]:
        plan, record = self.router(tokens, context)
        if isinstance(plan, SlotsPlan):
            return plan, record
        number = record.probs.shape[-1]
        experts = torch.arange(number, device=tokens.device).expand(record.probs.shape)
        everyone = SparsePlan.build(experts, record.probs, None, number)
        ones = torch.ones_like(record.probs)
        return everyone, record._replace(load=ones, chosen=ones.bool(), combine=record.probs)

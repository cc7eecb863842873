"""As many experts as a token comes near to, by learned thresholds (DynMoE, Guo et al. 2024).

B images, T tokens per image, E experts, d width.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.token_choice import (
    cosines_to_embeddings,
    expert_probs,
    plan_and_record,
    top_k,
)


class Dynamic(Router):
    """Chosen are the experts whose σ(cosine with the token) is above their own threshold, with even
    weights; a token near to none uses no expert in training, and the nearest in evaluation.

    The loss ``diversity_simplicity`` keeps its embeddings apart and short. Every slot is computed,
    so fewer experts save no time yet.
    """

    own_loss: ClassVar[str | None] = "diversity_simplicity"

    has_expert_thresholds: ClassVar[bool] = True

    kind: Literal["dynamic"] = "dynamic"

    @property
    def provides(self) -> frozenset[str]:
        """Return what its module gives beyond probs."""
        return frozenset({"embeddings"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "DynamicRouter":
        """The router of ``width``-wide tokens over ``experts`` experts."""
        return DynamicRouter(width, experts)


class DynamicRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    ``embeddings`` (E, d) have the cosines, σ(``thresholds``), (E,), is what their σ must exceed. A
    weight is 1 over the number of the chosen, with the gradient of their distances to thresholds.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        drawn = nn.init.normal_(torch.empty(experts, width), std=width**-0.5)
        self.embeddings = nn.Parameter(drawn)  # lengths near 1, as the cosine router's
        self.thresholds = nn.Parameter(torch.zeros(experts))

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        with full_precision(tokens):
            logits = cosines_to_embeddings(tokens, self.embeddings)
            above = torch.relu(torch.sigmoid(logits) - torch.sigmoid(self.thresholds))
            chosen = above > 0
            if not self.training:
                nearest = torch.zeros_like(chosen).scatter(-1, top_k(logits, 1), True)
                chosen = chosen | (nearest & ~chosen.any(dim=-1, keepdim=True))
            # 1 where chosen, with the gradient of ``above``: straight through
            ones = chosen + (above - above.detach())
            return plan_and_record(
                logits=logits,
                probs=expert_probs(logits, "sigmoid"),
                chosen=torch.arange(len(self.thresholds), device=tokens.device).expand_as(logits),
                weights=ones / chosen.sum(dim=-1, keepdim=True).clamp_min(1),
                valid=chosen,
            )

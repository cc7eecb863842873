"""DynMoE (Guo et al. 2024): each token uses the experts above learned similarity thresholds."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers import base, token_choice
from moecore.nn.routers.token_choice import PlanAndRecord


class Dynamic(base.Router):
    """Choose the experts whose σ(cosine with the token) is above their threshold, equally weighted.

    A token below all thresholds uses no expert in training, and the nearest in evaluation. The loss
    ``diversity_simplicity`` keeps embeddings apart and short. Every slot is computed, so fewer
    experts save no time.
    """

    own_loss: ClassVar[str | None] = "diversity_simplicity"

    has_expert_thresholds: ClassVar[bool] = True

    kind: Literal["dynamic"] = "dynamic"

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"embeddings"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "DynamicRouter":
        return DynamicRouter(width, experts)


# An expert is chosen if σ(cosine of token and ``embeddings`` (E, d)) > σ(``thresholds`` (E,)). A
# weight is 1 over the number of chosen experts, with the gradient of the distances to thresholds.
class DynamicRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        embeddings = nn.init.normal_(torch.empty(experts, width), std=width**-0.5)
        self.embeddings = nn.Parameter(embeddings)  # lengths near 1, as in the cosine router
        self.thresholds = nn.Parameter(torch.zeros(experts))

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        with full_precision(tokens):
            logits = token_choice.cosines_to_embeddings(tokens, self.embeddings)
            above = torch.relu(torch.sigmoid(logits) - torch.sigmoid(self.thresholds))
            chosen = above > 0
            if not self.training:
                nearest = torch.zeros_like(chosen).scatter(-1, token_choice.top_k(logits, 1), True)
                chosen = chosen | (nearest & ~chosen.any(dim=-1, keepdim=True))
            # 1 where chosen, with the gradient of ``above`` (straight-through)
            ones = chosen + (above - above.detach())
            return token_choice.plan_and_record(
                logits=logits,
                probs=token_choice.expert_probs(logits, "sigmoid"),
                chosen=torch.arange(len(self.thresholds), device=tokens.device).expand_as(logits),
                weights=ones / chosen.sum(dim=-1, keepdim=True).clamp_min(1),
                valid=chosen,
            )

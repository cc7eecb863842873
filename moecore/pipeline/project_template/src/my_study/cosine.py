"""A cosine router: a token goes to the experts with the most similar directions.

B images, T tokens per image, E experts, k chosen per token, d width.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from moecore.parts import (
    Router,
    RoutingContext,
    RoutingRecord,
    SparsePlan,
    full_precision,
    plan_and_record,
    router_logits,
    top_k,
)


class Cosine(Router):
    """The k experts with the nearest directions, weighted by a softmax over all experts."""

    kind: Literal["my_study.cosine"] = "my_study.cosine"
    k: int = Field(2, ge=1, description="experts per token")
    temperature: float = Field(0.1, gt=0, description="divides the cosines before the softmax")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "CosineRouter":
        """Return the router for tokens of ``width``; UserError if k is larger than ``experts``."""
        self.check_k(experts)
        return CosineRouter(self, width, experts)


class CosineRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: Cosine, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.directions = nn.Parameter(torch.randn(experts, width))

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        with full_precision(tokens):  # under autocast, rounding would change which expert wins
            directions = normalize(self.directions, dim=-1)
            cosines = router_logits(normalize(tokens, dim=-1), directions)
            logits = cosines / self.config.temperature
            probs = torch.softmax(logits, dim=-1)
            chosen = top_k(logits, self.config.k)
            weights = probs.gather(-1, chosen)
            return plan_and_record(logits=logits, probs=probs, chosen=chosen, weights=weights)

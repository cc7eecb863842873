"""The oracle router: send each token to the expert of its true kind in generated data."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.routers.base import Router
from moecore.nn.routers.token_choice import PlanAndRecord, plan_and_record, safe_log


class Told(Router):
    """Send tokens of kind n = 1, 2, … to expert ⌊(n − 1) / ``together``⌋ mod E; unknown: expert 0.

    A kind is the true group of a token of generated data. Nothing is learned: this is the upper
    bound of what a router can find (*our own*).
    """

    has_expert_rows: ClassVar[bool] = False

    kind: Literal["told"] = "told"
    together: int = Field(1, ge=1, description="adjacent kinds that share an expert, a family")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"truth"})

    def active(self, experts: int) -> float:
        return 1

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "ToldRouter":
        return ToldRouter(experts, self.together)


class ToldRouter(nn.Module):
    """``router(tokens, context)``: tokens (B, T, d) to (SparsePlan, RoutingRecord), weight 1."""

    def __init__(self, experts: int, together: int = 1) -> None:
        super().__init__()
        self.experts = experts
        self.together = together

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        assert context.truth is not None
        chosen = ((context.truth - 1).clamp_min(0) // self.together % self.experts).unsqueeze(-1)
        weights = torch.ones_like(chosen, dtype=torch.promote_types(tokens.dtype, torch.float32))
        probs = weights.new_zeros(*tokens.shape[:2], self.experts).scatter(-1, chosen, weights)
        return plan_and_record(logits=safe_log(probs), probs=probs, chosen=chosen, weights=weights)

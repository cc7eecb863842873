"""A router over experts that were merged: each chooses for its cluster (HC-SMoE, 2410.08589).

B images, T tokens per image, E experts that it chooses among, M clusters of them, d width.
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, WithJsonSchema
from torch import Tensor, nn
from torch.nn.functional import one_hot

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.token_choice import plan_and_record, top_k


class Folded(Router):
    """A router of more experts than there are; weights and probs are summed within clusters.

    The stage ``merge`` writes it; which expert is in which cluster is a buffer, which begins as
    equal runs of experts.
    """

    has_expert_rows: ClassVar[bool] = False  # they are of the experts that there were

    kind: Literal["folded"] = "folded"
    router: Annotated[Router, WithJsonSchema({"type": "object"})] = Field(  # itself among them
        NoisyTopK(), description="the router before experts were merged"
    )
    experts: int = Field(8, ge=2, description="experts that it chooses among")

    @property
    def wants(self) -> frozenset[str]:
        """Return what the router within wants, but for what it asks of experts while it learns."""
        return self.router.wants - {"outputs"}

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError where the router within does."""
        self.router.check_causal(f"{key}.router")

    def active(self, experts: int) -> float:
        """Return how many clusters a token uses at most: as many as experts, or all."""
        return min(self.router.active(self.experts), experts)

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "FoldedRouter":
        """Return the router over ``experts`` clusters; UserError for too many of them, or few."""
        least = getattr(self.router, "k", None) or 1
        if not least <= experts <= self.experts:
            allowed = f"{least} (router.k) to {self.experts} (router.experts)"
            raise UserError(f"experts.number: found {experts}; allowed: {allowed}")
        refuse_unfoldable_router(self.router, "router.router")
        return FoldedRouter(self, width, experts, basis)


def refuse_unfoldable_router(router: Router, key: str, or_else: str = "") -> None:
    """Raise UserError, with the router's key, where clusters cannot stand for its experts.

    The record of a folded router lacks the logits of the experts that there were, which a router
    with ``residual`` would read in the next layer. or_else: what else is allowed.
    """
    if not router.chooses_per_token:
        problem = f"found {router.kind}, by which tokens choose nothing"
        raise UserError(f"{key}.kind: {problem}; allowed: others{or_else}")
    if "previous" in router.wants:
        problem = "found true, but the layer before has no logits of single experts any more"
        raise UserError(f"{key}.residual: {problem}; allowed: false{or_else}")
    if router.kind == "depth":
        problem = "found depth, whose tokens do not all use experts"
        raise UserError(f"{key}.kind: {problem}; allowed: others{or_else}")


class FoldedRouter(nn.Module):
    """``router(tokens, context)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    The record has M experts; its logits are the logarithms of their probs.
    """

    clusters: Tensor  # (E,) int64

    def __init__(self, config: Folded, width: int, experts: int, basis: Tensor | None) -> None:
        super().__init__()
        self.router = config.router.build(width, config.experts, basis)
        self.number = experts
        runs = torch.arange(config.experts) * experts // config.experts
        self.register_buffer("clusters", runs)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        with full_precision(tokens):
            plan, record = self.router(tokens, context)
            combine, probs, chosen = (
                self.fold(values) for values in (record.combine, record.probs, record.chosen)
            )
            slots = min(plan.weights.shape[-1], self.number)
            best = top_k(combine.where(chosen > 0, -1), slots)
            return plan_and_record(
                logits=probs.clamp_min(torch.finfo(probs.dtype).tiny).log(),
                probs=probs,
                chosen=best,
                weights=combine.gather(-1, best),
                valid=chosen.gather(-1, best) > 0,
            )

    def fold(self, values: Tensor) -> Tensor:
        """Return the sums (B, T, M) of values (B, T, E) within clusters."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        return values.to(dtype) @ one_hot(self.clusters, self.number).to(dtype)

"""A router over M merged experts: each original expert stands for its cluster (HC-SMoE)."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, WithJsonSchema
from torch import Tensor, nn
from torch.nn.functional import one_hot

from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.token_choice import PlanAndRecord, plan_and_record, safe_log, top_k


class Folded(Router):
    """Choose merged experts by a router of the original ones; sum its weights and probs by cluster.

    The stage ``merge`` writes this section. The buffer ``clusters`` has each original expert's
    cluster, the index of its merged expert; initially, consecutive experts in equal numbers.
    """

    has_expert_rows: ClassVar[bool] = False  # rows belong to the experts before merging

    kind: Literal["folded"] = "folded"
    # its own schema would contain itself
    router: Annotated[Router, WithJsonSchema({"type": "object"})] = Field(
        {"kind": "noisy_top_k"},  # not imported: merging depends on this file
        validate_default=True,
        description="the router before experts were merged",
    )
    experts: int = Field(8, ge=2, description="number of experts before merging")

    @property
    def wants(self) -> frozenset[str]:
        """RoutingContext fields that the inner router reads, except ``outputs`` (training only)."""
        return self.router.wants - {"outputs"}

    def check_causal(self, key: str = "router") -> None:
        self.router.check_causal(f"{key}.router")

    def active(self, experts: int) -> float:
        """Return the maximum number of clusters that a token uses."""
        return min(self.router.active(self.experts), experts)

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "FoldedRouter":
        fewest = getattr(self.router, "k", None) or 1
        if not fewest <= experts <= self.experts:
            raise UserError.at(
                "experts.number",
                found=experts,
                allowed=f"{fewest} (router.k) to {self.experts} (router.experts)",
            )
        refuse_unclusterable_router(self.router, "router.router")
        return FoldedRouter(self, width, experts, basis)


def refuse_unclusterable_router(router: Router, key: str, or_else: str = "") -> None:
    """Raise UserError, ending with ``or_else``, if a router cannot choose clusters of experts."""
    if not router.chooses_per_token or router.kind == "depth":
        raise UserError.at(
            f"{key}.kind",
            found=f"{router.kind}, whose tokens do not all choose experts",
            allowed=f"others{or_else}",
        )
    if "previous" in router.wants:
        raise UserError.at(
            f"{key}.residual",
            found="true, but the previous layer no longer has the logits of single experts",
            allowed=f"false{or_else}",
        )


# The record has M experts; its logits are the logarithms of their probs.
class FoldedRouter(nn.Module):
    """``router(tokens, context)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    clusters: Tensor  # (E,) int64

    def __init__(self, config: Folded, width: int, experts: int, basis: Tensor | None) -> None:
        super().__init__()
        self.router = config.router.build(width, config.experts, basis)
        self.number = experts
        self.register_buffer("clusters", torch.arange(config.experts) * experts // config.experts)

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        """Route among the experts before merging; return plan and record over the clusters."""
        with full_precision(tokens):
            plan, record = self.router(tokens, context)
            fields = (record.combine, record.probs, record.chosen)
            combine, probs, chosen = (self.sum_within_clusters(values) for values in fields)
            best = top_k(combine.where(chosen > 0, -1), min(plan.weights.shape[-1], self.number))
            weights = combine.gather(-1, best)
            valid = chosen.gather(-1, best) > 0
            return plan_and_record(
                logits=safe_log(probs), probs=probs, chosen=best, weights=weights, valid=valid
            )

    def sum_within_clusters(self, values: Tensor) -> Tensor:
        """Sum values (B, T, E) within clusters, (B, T, M)."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        return values.to(dtype) @ one_hot(self.clusters, self.number).to(dtype)

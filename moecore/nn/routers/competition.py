"""Competition (CompeteSMoE, Nguyen et al. 2025): experts with the strongest outputs are chosen."""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import normalize, one_hot, softplus

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.balances.base import Balance
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers import base, token_choice
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import PlanAndRecord, plan_and_record


class Competition(base.Router):
    """Choose the top k of a softmax, renormalised; in a few training steps experts compete.

    In such a step a layer computes all experts, which takes E / k times the experts' time, and the
    k with the largest mean softplus of their outputs are chosen. Its penalty is part of the
    objective.
    """

    kind: Literal["competition"] = "competition"
    k: int = Field(2, ge=1, description="experts per token")
    share: float = Field(0.07, ge=0, le=1, description="chance that a layer competes in a step")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the training before any compete")
    router_weight: float = Field(
        ge=0,
        allow_inf_nan=False,
        description="weight of the router's loss: the mean squared distance of its probs to the "
        "softmax of the experts' strengths (paper 1e-3, code 1e-2)",
    )
    chosen_weight: float = Field(
        ge=0, allow_inf_nan=False, description="the same over chosen experts (paper 0.2, code 0.1)"
    )
    diversity_weight: float = Field(
        ge=0, allow_inf_nan=False, description="of half the mean cosine of chosen outputs; k ≥ 2"
    )
    bal_comp: float = Field(
        0.01, ge=0, allow_inf_nan=False, description="balance loss on strengths, in competing steps"
    )
    balance: Balance | None = Field(
        None, description="balancing of the load by shifting the choice by the softmax; null: none"
    )

    @model_validator(mode="after")
    def _check_k_allows_diversity(self) -> "Competition":
        if self.k == 1 and self.diversity_weight:
            raise ValueError(
                f"diversity_weight: found {self.diversity_weight}, but with k = 1 no two experts "
                "are chosen; allowed: 0, or a larger k"
            )
        return self

    def check_causal(self, key: str = "router") -> None:
        if self.balance is not None:
            self.balance.check_causal(f"{key}.balance")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"outputs"})

    def phase(self, progress: float) -> float:
        """Return 0 if the layer's experts compete in this step, else 1, as in evaluation."""
        if not self.warmup <= progress < 1:
            return 1.0
        # on the CPU whatever the model's device: equal on all ranks, and the host does not wait
        return float(torch.rand((), device="cpu").item() >= self.share)

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "CompetitionRouter":
        self.check_k(experts)
        return CompetitionRouter(self, width, experts)


# With ``context.outputs`` (B, T, E, d), experts' strengths (mean softplus of these) decide, else
# the softmax of the logits. In training the record has a penalty, 0 without a competition.
class CompetitionRouter(NoisyTopKRouter):
    """``router(tokens, context)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: Competition, width: int, experts: int) -> None:
        decision = NoisyTopK(k=config.k, noise_std=0.0, renormalise=True, balance=config.balance)
        super().__init__(decision, width, experts)
        self.settings = config

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        outputs = context.outputs
        if outputs is None:
            plan, record = super().forward(tokens, context)
            nothing = record.logits.new_zeros(tokens.shape[:2]) if self.training else None
            return plan, record.with_penalty(nothing)
        with full_precision(tokens):
            logits = self.logits(tokens)
            probs = torch.softmax(logits, dim=-1)
            outputs = outputs.to(logits.dtype)
            strengths = softplus(outputs).mean(dim=-1)
            chosen = token_choice.top_k(strengths, self.config.k)
            best = strengths.gather(-1, chosen)
            gates = token_choice.gate_weights(best, best, "relu", renormalise=True)
            plan, record = plan_and_record(logits=logits, probs=probs, chosen=chosen, weights=gates)
            shares = strengths.softmax(dim=-1)
            errors = (probs - shares.detach()).square()
            settings = self.settings
            among_chosen = settings.chosen_weight * errors.gather(-1, chosen).mean(dim=-1)
            penalty = settings.router_weight * (errors.mean(dim=-1) + among_chosen)
            if settings.diversity_weight:
                alike = mean_cosine_among_chosen(outputs, chosen)
                penalty = penalty + settings.diversity_weight / 2 * alike
            if settings.bal_comp:
                uneven = compute_switch_balance_loss(shares, chosen[..., 0], context.padding)
                penalty = penalty + settings.bal_comp * uneven
            return plan, record.with_penalty(penalty)


def mean_cosine_among_chosen(outputs: Tensor, chosen: Tensor) -> Tensor:
    """Return (B, T): sum of cosines between outputs of different chosen experts, divided by k²."""
    places = chosen.unsqueeze(-1).expand(*chosen.shape, outputs.shape[-1])
    directions = normalize(outputs.gather(-2, places), dim=-1, eps=token_choice.MIN_NORM)
    cosines = directions @ directions.mT
    return (cosines - torch.diag_embed(cosines.diagonal(dim1=-2, dim2=-1))).mean(dim=(-2, -1))


def compute_switch_balance_loss(shares: Tensor, winners: Tensor, padding: Tensor | None) -> Tensor:
    """Return Switch's balance loss (B, T), E Σ_e f_e P_te; P: ``shares``, f: share of wins."""
    # shares: P (B, T, E), softmax of strengths, which alone has a gradient. winners: (B, T)
    # int64; f is each expert's share of these. padding: (B, T) bool, tokens that do not count.
    experts = shares.shape[-1]
    wins = one_hot(winners, experts).to(shares.dtype)
    if padding is not None:
        wins = wins * ~padding.unsqueeze(-1)
    counts = wins.sum(dim=1, keepdim=True)
    win_shares = counts / counts.sum(dim=-1, keepdim=True)
    return experts * (win_shares * shares).sum(dim=-1)

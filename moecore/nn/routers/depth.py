"""Mixture-of-Depths (Raposo et al. 2024): a share of an image's tokens uses experts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from moecore.core.config import Misfits, Surroundings, list_idle_misfits
from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows, SparsePlan
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import CAUSAL_ROUTERS, Router, exact_fraction
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits


class Depth(Router):
    """Let the ``share`` of an image's tokens with the largest scores r use experts, weighted by r.

    An inner router chooses their experts; the output of all other tokens is 0. Participation
    depends on all tokens of the image. For text, ``sampling`` trains a prediction from each token
    alone, and evaluation uses the prediction.
    """

    kind: Literal["depth"] = "depth"
    share: float = Field(0.125, gt=0, le=1, description="share of images' tokens that use experts")
    sampling: Literal["bce", "predictor"] | None = Field(
        None,
        description="decision per token alone in evaluation: bce: r > 0; predictor: score > 0 of a "
        "small network; null: by rank, as in training",
    )
    sampling_weight: float = Field(
        0.01, ge=0, allow_inf_nan=False, description="of the penalty that teaches the decision"
    )
    router: NoisyTopK = Field(NoisyTopK(), description="router of the tokens that use experts")

    @model_validator(mode="after")
    def _check_inner_router(self) -> Self:
        inner = self.router
        if inner.balance is not None and inner.balance.is_alone:
            key = "balance"
        elif inner.residual:
            key = "residual"
        elif self.sampling and inner.eval_capacity_factor:
            key = "eval_capacity_factor"
        else:
            return self
        raise ValueError(f"router.{key}: found one, with tokens that skip; allowed: none")

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if self.sampling is None:
            why, allowed = "without sampling there is no penalty", "sampling: bce or predictor"
            yield from list_idle_misfits(self, ["sampling_weight"], why, allowed)

    @property
    def k(self) -> int:
        """Experts per participating token."""
        return self.router.k

    @property
    def provides(self) -> frozenset[str]:
        return self.router.provides

    @property
    def looks_ahead_in_training(self) -> bool:
        return True

    def active(self, experts: int) -> float:
        return self.share * self.k

    def with_k(self, k: int) -> Self:
        return self.model_copy(update={"router": self.router.with_k(k)})

    def check_causal(self, key: str = "router") -> None:
        if self.sampling is None:
            raise UserError.at(
                f"{key}.sampling",
                found="null: later words decide which words use experts, in evaluation too",
                allowed=f"bce or predictor; or {CAUSAL_ROUTERS}",
            )
        self.router.check_causal(f"{key}.router")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "DepthRouter":
        self.router.check_experts(width, experts, key="router.router")
        return DepthRouter(self, width, experts)


# ``weight`` (1, d) gives r. With a predictor, ``inner`` (d, d), GELU and ``outer`` (1, d) give its
# score. In the record, skipped tokens have logits of 0, uniform probs, and no expert.
class DepthRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (DepthPlan, RoutingRecord)."""

    def __init__(self, config: Depth, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.share = exact_fraction(config.share)
        self.router = NoisyTopKRouter(config.router, width, experts)
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, width), std=0.02))
        self.inner: nn.Parameter | None = None
        if config.sampling == "predictor":
            weight = nn.init.trunc_normal_(torch.empty(width, width), std=width**-0.5)
            self.inner = nn.Parameter(weight)
            self.outer = nn.Parameter(torch.zeros(1, width))

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> "tuple[DepthPlan, RoutingRecord]":
        with full_precision(tokens):
            scores = router_logits(tokens, self.weight)
            signs = scores
            if self.inner is not None:
                signs = router_logits(gelu(router_logits(tokens.detach(), self.inner)), self.outer)
            ranks, decisions = scores.detach().squeeze(-1), signs.detach().squeeze(-1)
            places = self._choose_tokens(ranks, decisions, context.padding)
            shape = (tokens.shape[0], tokens.shape[1])
            plan, record = self.router(tokens.flatten(0, 1)[places], context)
            factors = scores.flatten(0, 1)[places]
            plan = plan._replace(weights=plan.weights * factors)
            record = record._replace(combine=record.combine * factors)
            blanks = iter((0, 1 / record.probs.shape[-1], 0, False, 0))
            record = record.map_tensors(
                lambda field: scatter_tokens(field, places, shape, next(blanks))
            )
            if self.training and self.config.sampling is not None:  # predict which tokens take part
                signs, took_part = signs.squeeze(-1), record.chosen.any(dim=-1).to(signs.dtype)
                losses = binary_cross_entropy_with_logits(signs, took_part, reduction="none")
                record = record.with_penalty(self.config.sampling_weight * losses)
            return DepthPlan(plan, places, shape), record

    def after_step(self, records: Sequence[RoutingRecord], place: int, progress: float) -> None:
        self.router.after_step(records, place, progress)

    def _choose_tokens(self, scores: Tensor, signs: Tensor, padding: Tensor | None) -> Tensor:
        """Return flat indices of C best tokens (B, C); sampled evaluation: of signs > 0, (1, n)."""
        if self.config.sampling and not self.training and not scores.is_meta:
            return (signs.flatten() > 0).nonzero().T
        images, tokens = scores.shape
        number = max(1, tokens * self.share.numerator // self.share.denominator)
        ranked = scores.argsort(dim=1, descending=True, stable=True)
        if padding is not None:  # first the share of a caption's text, then padding, other text
            is_text = ~padding.gather(1, ranked)
            limit = is_text.sum(dim=1, keepdim=True) * self.share.numerator
            limit = (limit // self.share.denominator).clamp_min(1)
            takes_part = is_text & (is_text.cumsum(dim=1) <= limit)
            priority = torch.where(takes_part, 0, 1 + is_text.int())
            ranked = ranked.gather(1, priority.argsort(dim=1, stable=True))
        starts = torch.arange(images, device=scores.device).unsqueeze(1) * tokens
        return ranked[:, :number].sort(dim=1).values + starts


class DepthPlan(NamedTuple):
    """The plan of C participating tokens in each of G groups; the output of all others is 0."""

    is_per_token = True

    plan: SparsePlan
    places: Tensor  # (G, C) their indices among the B·T tokens
    shape: tuple[int, int]  # B, T

    def keep_experts(self, number: int) -> "DepthPlan":
        return self._replace(plan=self.plan.keep_experts(number))

    def dispatch(self, tokens: Tensor) -> Rows:
        return self.plan.dispatch(tokens.flatten(0, 1)[self.places])

    def combine(self, rows: Tensor) -> Tensor:
        return scatter_tokens(self.plan.combine(rows), self.places, self.shape, 0)


def scatter_tokens(values: Tensor, places: Tensor, shape: tuple[int, int], blank: float) -> Tensor:
    """Scatter values (G, C, n) to ``places`` of B·T tokens, (B, T, n); ``blank`` elsewhere."""
    tokens = values.new_full((shape[0] * shape[1], values.shape[-1]), blank)
    return tokens.index_copy(0, places.flatten(), values.flatten(0, 1)).unflatten(0, shape)

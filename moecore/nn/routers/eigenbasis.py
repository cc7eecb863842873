"""The eigenbasis router of ERMoE, by the cosine of token and context in each expert's basis."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Misfits, Surroundings, list_idle_misfits
from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.dispatch import BasisProjectionPlan, SparsePlan
from moecore.nn.experts.base import default_rank, draw_bases, positive_qr
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers import base, token_choice

_MIN_WEIGHT = 1e-6  # of a chosen expert before normalising; scores can be negative
# the field of RoutingContext that each context reads
_FIELD_BY_CONTEXT: dict[str, str] = {"tokens": "attention", "attention_output": "attended"}


class Eigenbasis(base.Router):
    """Choose the best k experts by cos(Bᵀx, Bᵀc) of token x and context c, above a threshold.

    B (d, r) is each expert's basis, or the router's if experts have none (ERMoE, table S3, `plain
    weights`). c is what the token's attention gathered: attention · tokens by default, or its
    output. A learned context reads no attention: the score is cos(Bᵀx, ψ) with a vector ψ in R^r
    per expert (ERMoE's brain model, algorithm 2, line 8).
    """

    has_score_threshold: ClassVar[bool] = True

    kind: Literal["eigenbasis"] = "eigenbasis"
    k: int = Field(2, ge=1, description="experts per token, at most")
    threshold: float = Field(0.5, ge=-1, le=1, description="eligible experts' cosines are above it")
    selection: Literal["prune", "literal"] = Field(
        "prune", description="prune: eligible experts only; literal: Algorithm 1 as is"
    )
    context: Literal["tokens", "attention_output", "learned"] = Field(
        "tokens", description="c: attention · tokens, the attention's output, or a learned vector"
    )
    rank: int | None = Field(None, ge=1, description="if experts have no basis; null: 2/3 width")

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if around.experts is not None and "basis" in around.experts.provides:
            why = f"the experts {around.experts.kind} have bases, which the router uses"
            yield from list_idle_misfits(self, ["rank"], why, "other experts")

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"basis"})

    @property
    def wants(self) -> frozenset[str]:
        read = () if self.context == "learned" else (_FIELD_BY_CONTEXT[self.context],)
        return frozenset({"basis", *read})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "EigenbasisRouter":
        self.check_k(experts)
        if self.rank is not None and (basis is not None or self.rank > width):
            if basis is None:
                allowed = f"at most {width} (model.width), or null"
            else:
                allowed = "null: the router uses the experts' bases (experts.rank)"
            raise UserError.at("router.rank", found=self.rank, allowed=allowed)
        return EigenbasisRouter(self, width, experts, basis)


# The experts' basis comes with each call (``context.basis``), and the experts then reuse the
# router's projections. With k = 1 the weight is always 1, so that scores have no task gradient. All
# arithmetic is in fp32 or fp64. ``barred``: experts that measurements forbid, see
# ``top_k_and_unbarred_mask``.
class EigenbasisRouter(nn.Module):
    """``router(tokens, context)`` with tokens (B, T, d) returns (plan, record of the scores)."""

    barred: Tensor | None = None

    def __init__(self, config: Eigenbasis, width: int, experts: int, basis: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.basis: nn.Parameter | None = None
        if basis is None:
            basis = self.basis = draw_bases(experts, width, config.rank or default_rank(width))
        self.target: nn.Parameter | None = None
        if config.context == "learned":
            # Only the direction matters; with lengths near 1 the optimizer turns it as fast as a
            # column of the basis.
            rank = basis.shape[-1]
            self.target = nn.Parameter(torch.randn(experts, rank) / rank**0.5)

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> tuple["SparsePlan | BasisProjectionPlan", RoutingRecord]:
        with full_precision(tokens):
            basis = self._require_field("basis", context) if self.basis is None else self.basis
            basis = basis.to(torch.promote_types(basis.dtype, torch.float32))
            tokens = tokens.to(basis.dtype)
            projections = project_on_bases(tokens, basis)
            if self.target is not None:
                contexts = self.target.to(basis.dtype)
            else:
                field = _FIELD_BY_CONTEXT[self.config.context]
                values = self._require_field(field, context).to(basis.dtype)
                if field == "attended":
                    contexts = project_on_bases(values, basis)
                else:
                    contexts = project_contexts(values, tokens, projections, basis)
            chosen, plan, record = self.decide(safe_cosine(projections, contexts))
        if self.basis is not None:
            return plan, record
        return BasisProjectionPlan.build(plan, projections, chosen), record

    def decide(self, scores: Tensor) -> tuple[Tensor, SparsePlan, RoutingRecord]:
        """Return experts (B, T, k), best first, plan and record for scores (B, T, E)."""
        chosen, valid = token_choice.top_k_and_unbarred_mask(scores, self.config.k, self.barred)
        positive = scores.clamp_min(_MIN_WEIGHT)
        weights = positive.gather(-1, chosen)
        probs = positive / positive.sum(dim=-1, keepdim=True)
        # Of the k best, those above the threshold are chosen, or all if none is (the fallback). The
        # best k of A = {e : s > threshold} are the members of the global top k that are in A. So
        # Algorithm 1 as printed (top k of A if |A| ≥ k, else global top k) always equals the global
        # top k, whatever the threshold: `literal` needs no mask.
        if self.config.selection == "prune":
            above = scores.gather(-1, chosen) > self.config.threshold
            eligible = above | ~above[..., :1]
            valid = eligible if valid is None else eligible & valid
            weights = weights.where(valid, 0)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, *token_choice.plan_and_record(
            logits=scores, probs=probs, chosen=chosen, weights=weights, valid=valid
        )

    @torch.no_grad()
    def reorthonormalise(self) -> None:
        """Make the router's own bases orthonormal (QR, diag(R) > 0, fp64), not the experts'."""
        if self.basis is not None:
            self.basis.copy_(positive_qr(self.basis)[0])

    def _require_field(self, field: str, context: RoutingContext) -> Tensor:
        value = getattr(context, field)
        if value is None:
            raise UserError(
                f"eigenbasis router (router.context: {self.config.context}): this model gives it "
                f"no `{field}`; `basis` must come from the model's experts, `attention` and "
                "`attended` from its attention blocks. Use a model that has them, or another "
                "router.context"
            )
        return value


def project_on_bases(tokens: Tensor, basis: Tensor) -> Tensor:
    """Return Bᵀx per expert, (B, T, E, r), for tokens (B, T, d) and basis (E, d, r)."""
    projections = tokens @ basis.transpose(0, 1).flatten(1)
    return projections.unflatten(-1, (basis.shape[0], basis.shape[2]))


def project_contexts(
    attention: Tensor, tokens: Tensor, projections: Tensor, basis: Tensor
) -> Tensor:
    """Return Bᵀc (B, T, E, r) for c = attention (B, T, T) · the router's tokens (our choice)."""
    # Bᵀ(attention · x) = attention · (Bᵀx): take the order with fewer multiplications per token,
    # T·d + d·E·r or T·E·r.
    length, width = tokens.shape[1:]
    outputs = basis[:, 0].numel()
    if length * width + width * outputs < length * outputs:
        return project_on_bases(attention @ tokens, basis)
    return (attention @ projections.flatten(2)).view_as(projections)


def safe_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine over the last axis; 0 with zero gradient for vectors below 1e-19 (fp32)."""
    # torch's cosine_similarity divides by at least 1e-8 instead, so that its gradient is 1e8
    first_square = first.square().sum(dim=-1)
    second_square = second.square().sum(dim=-1)
    tiny = torch.finfo(first.dtype).tiny
    is_long = (first_square >= tiny) & (second_square >= tiny)
    # `where` before the root as well as after it: a root at 0 has an infinite gradient
    product = (first * second).sum(dim=-1)
    product = product * first_square.where(is_long, 1).rsqrt()
    return (product * second_square.where(is_long, 1).rsqrt()).where(is_long, 0)

"""SMEAR (Muqeeth et al. 2023): per image, one expert with the weighted mean of all parameters."""

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows
from moecore.nn.kernels.grouped import full_precision, to_autocast
from moecore.nn.routers import base, token_choice


class Merged(base.Router):
    """Average the experts' parameters per image, with shares that its mean token decides.

    All tokens of an image use the merged expert. A token costs as much as with one expert; merging
    costs as much as E additional tokens per image, plus memory for the merged parameters.
    """

    chooses_per_token: ClassVar[bool] = False
    looks_ahead: ClassVar[str | None] = "whose experts are merged by the mean of all words"

    kind: Literal["merged"] = "merged"
    normalise: bool = Field(True, description="layer norm of mean token and router (authors' code)")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "MergedRouter":
        if basis is not None:
            raise UserError.at(
                "experts.kind",
                found="experts with bases, whose mean is not a basis",
                allowed="mlp with the router merged",
            )
        return MergedRouter(self, width, experts)


class MergedPlan(NamedTuple):
    """All tokens in their order, each image's tokens with its merged expert."""

    uses_all_experts = True  # every expert contributes to every token

    shares: Tensor  # (B, E), sum to 1 per image

    def dispatch(self, tokens: Tensor) -> Rows:
        """Return tokens (B, T, d) as rows (B·T, d), image by image."""
        batch, length = tokens.shape[:2]
        ends = torch.arange(1, batch + 1, dtype=torch.int32, device=tokens.device) * length
        return Rows(to_autocast(tokens).flatten(0, 1), ends, shares=self.shares)

    def combine(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (len(self.shares), -1))


# ``weight`` (E, d), ``bias`` (E,), ``gain`` (d,) of both norms if there are any. In the record
# every expert is chosen, and all tokens of an image have the image's logits and shares.
class MergedRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (MergedPlan, RoutingRecord)."""

    merges_experts = True

    def __init__(self, config: Merged, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))
        self.bias = nn.Parameter(torch.zeros(experts))
        self.gain = nn.Parameter(torch.full((width,), 0.01)) if config.normalise else None

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> tuple[MergedPlan, RoutingRecord]:
        with full_precision(tokens):
            mean = tokens.to(torch.promote_types(tokens.dtype, torch.float32)).mean(dim=1)
            weight = self.weight
            if self.gain is not None:
                mean = layer_norm(mean, mean.shape[-1:])
                weight = layer_norm(weight, weight.shape[-1:]) * self.gain
            logits = token_choice.router_logits(mean, weight, self.bias)
            shares = torch.softmax(logits, dim=-1)
            logits, probs = (row[:, None].repeat(1, tokens.shape[1], 1) for row in (logits, shares))
            ones = torch.ones_like(probs)
            return MergedPlan(shares), RoutingRecord(logits, probs, ones, ones.bool(), probs)

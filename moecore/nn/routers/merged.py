"""Experts merged for each image (SMEAR, Muqeeth et al. 2023): one pass through the mean of their
parameters.

B images, T tokens per image, E experts, d width.
"""

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows
from moecore.nn.kernels.grouped import full_precision, to_autocast
from moecore.nn.routers.base import CAUSAL, Router
from moecore.nn.routers.token_choice import router_logits


class Merged(Router):
    """An image's mean token decides in what shares the experts' weights and biases are averaged;
    all its tokens see the one expert that results.

    A token costs what one expert costs; to merge costs as much as E tokens more for each image, and
    memory for its parameters.
    """

    chooses_per_token: ClassVar[bool] = False

    kind: Literal["merged"] = "merged"
    normalise: bool = Field(
        True, description="layer norm of mean token and router weights (the authors' code)"
    )

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError: the shares look at all tokens."""
        problem = "found merged, whose experts are merged by the mean of all words, later ones too"
        raise UserError(f"{key}.kind: {problem}; allowed: {CAUSAL}")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "MergedRouter":
        """The router of ``width``-wide tokens; UserError for experts that have bases, whose mean is
        no basis.
        """
        if basis is not None:
            problem = "found experts with bases, whose mean is no basis"
            raise UserError(f"experts.kind: {problem}; allowed beside the router merged: mlp")
        return MergedRouter(self, width, experts)


class MergedPlan(NamedTuple):
    """All tokens in their order, each image's through its own merged expert."""

    shares: Tensor  # (B, E), sums to 1 for each image

    def dispatch(self, tokens: Tensor) -> Rows:
        """Tokens (B, T, d) to rows (B·T, d), image by image."""
        batch, length = tokens.shape[:2]
        ends = torch.arange(1, batch + 1, dtype=torch.int32, device=tokens.device) * length
        return Rows(to_autocast(tokens).flatten(0, 1), ends, shares=self.shares)

    def combine(self, rows: Tensor) -> Tensor:
        """Rows (B·T, d) to tokens (B, T, d)."""
        return rows.unflatten(0, (len(self.shares), -1))


class MergedRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (MergedPlan, RoutingRecord).

    ``weight`` (E, d), ``bias`` (E,); ``gain`` (d,) of both norms, where there are any. In the
    record everything is chosen, and all tokens of an image have its logits and shares.
    """

    merges_experts = True

    def __init__(self, config: Merged, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))
        self.bias = nn.Parameter(torch.zeros(experts))
        self.gain = nn.Parameter(torch.full((width,), 0.01)) if config.normalise else None

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[MergedPlan, RoutingRecord]:
        with full_precision(tokens):
            mean = tokens.to(torch.promote_types(tokens.dtype, torch.float32)).mean(dim=1)
            weight = self.weight
            if self.gain is not None:
                mean = layer_norm(mean, mean.shape[-1:])
                weight = layer_norm(weight, weight.shape[-1:]) * self.gain
            logits = router_logits(mean, weight, self.bias)
            shares = torch.softmax(logits, dim=-1)
            probs = shares.unsqueeze(1).repeat(1, tokens.shape[1], 1)
            ones = torch.ones_like(probs)
            return MergedPlan(shares), RoutingRecord(
                logits=logits.unsqueeze(1).repeat(1, tokens.shape[1], 1),
                probs=probs,
                load=ones,
                chosen=ones.bool(),
                combine=probs,
            )

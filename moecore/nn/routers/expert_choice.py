"""Expert Choice (Zhou et al. 2022), a baseline of TGR-MoE: experts choose tokens.

B images, T tokens per image, E experts, G groups of S tokens, C tokens taken by each expert in a
group, d width.
"""

from fractions import Fraction
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.core.streams import normal_like
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import CAUSAL, Router
from moecore.nn.routers.capacity import ceil_capacity, exact_fraction
from moecore.nn.routers.expert_choice import ExpertChoicePlan
from moecore.nn.routers.token_choice import router_logits


class ExpertChoice(Router):
    """Softmax over a linear map; each expert takes the tokens with its largest gates."""

    chooses_per_token: ClassVar[bool] = False

    kind: Literal["expert_choice"] = "expert_choice"
    k: int = Field(2, ge=1, description="experts per token on average, at capacity_factor 1")
    capacity_factor: float = Field(
        1.0, gt=0, description="tokens of an expert, relative to tokens · k / experts"
    )
    noise_std: float = Field(
        1.0, ge=0, description="noise on the logits in training, in units of 1 / experts"
    )
    group_size: int = Field(
        1, ge=1, description="images among whose tokens an expert chooses in training"
    )

    def active(self, experts: int) -> float:
        """k · capacity_factor, and at most all ``experts``."""
        return min(float(experts), self.k * self.capacity_factor)

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError: whether an expert takes a token depends on all tokens of its group."""
        problem = "found expert_choice, whose experts choose among all words, later ones too"
        raise UserError(f"{key}.kind: {problem}; allowed: {CAUSAL}")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "ExpertChoiceRouter":
        """The router of ``width``-wide tokens; UserError where k is above ``experts``."""
        self.check_k(experts)
        return ExpertChoiceRouter(self, width, experts)


class ExpertChoiceRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (ExpertChoicePlan, RoutingRecord).

    In evaluation every image is its own group: predictions do not depend on the batch.
    """

    def __init__(self, config: ExpertChoice, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.share = config.k * exact_fraction(config.capacity_factor)
        # as the ViT's other linears
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))

    @property
    def training_group(self) -> int:
        """Images among whose tokens an expert chooses in training."""
        return self.config.group_size

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[ExpertChoicePlan, RoutingRecord]:
        with full_precision(tokens):
            return self.decide(router_logits(tokens, self.weight))

    def decide(self, logits: Tensor) -> tuple[ExpertChoicePlan, RoutingRecord]:
        """The decision of these logits (B, T, E)."""
        std = 0.0
        if self.training:
            std = self.config.noise_std / logits.shape[-1]
        noisy = logits
        if std:
            noisy = logits + normal_like(logits) * std
        gates = torch.softmax(noisy, dim=-1)
        order = top_tokens_per_expert(
            gates.detach(), self.share, self.config.group_size if self.training else 1
        )
        by_expert = gates.flatten(0, 1).t()
        nothing = torch.zeros_like(by_expert, dtype=torch.bool)
        chosen = nothing.scatter(1, order, True).t().view(gates.shape)
        plan = ExpertChoicePlan(order, by_expert.gather(1, order), (gates.shape[0], gates.shape[1]))
        return plan, RoutingRecord(
            logits,
            torch.softmax(logits, dim=-1),
            chosen.to(gates.dtype),
            chosen,
            torch.where(chosen, gates, 0),
        )


def top_tokens_per_expert(gates: Tensor, share: Fraction, group_size: int) -> Tensor:
    """The tokens that each expert takes: in each group those with its C largest gates.

    C = min(S, ceil(S · share / E)), for groups of S tokens.
    gates: (B, T, E).  share: experts per token, on average.  group_size: images per group; those
    left over at the end form a smaller one.  Ties go to the lowest token.  Returns (E, G·C) indices
    into the B·T tokens, ascending for each expert.
    """
    left = len(gates) % group_size
    parts = [_top_tokens_in_groups(gates[: len(gates) - left], share, group_size)]
    if left:
        parts.append(
            _top_tokens_in_groups(gates[-left:], share, left) + (len(gates) - left) * gates.shape[1]
        )
    return torch.cat(parts, dim=1)


def _top_tokens_in_groups(gates: Tensor, share: Fraction, images: int) -> Tensor:
    """``top_tokens_per_expert`` where all groups hold as many ``images``."""
    batch, tokens, experts = gates.shape
    groups = batch // images
    size = images * tokens
    most = min(size, ceil_capacity(size, share, experts))
    by_expert = gates.reshape(groups, size, experts).transpose(1, 2).contiguous()
    ranked = by_expert.sort(dim=-1, descending=True, stable=True).indices
    best = ranked[..., :most].sort(dim=-1).values
    start = torch.arange(groups, device=gates.device).view(-1, 1, 1) * size
    return (best + start).transpose(0, 1).flatten(1)

"""Sinkhorn's balance: in training an even plan of tokens and experts chooses (S-BASE; Megatron).

B images, T tokens per image, E experts; G groups of S tokens.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.balances.base import Balance, BalanceModule
from moecore.nn.routers.capacity import group_images

LEAST = 1e-8  # beside a sum that is divided by


class Sinkhorn(Balance):
    """In training experts are chosen by the matrix nearest to exp(logits) whose tokens and experts
    all have even shares; evaluation chooses by the logits.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"
    group_size: int = Field(8, ge=1, description="images that share a plan")
    tolerance: float = Field(
        1e-4,
        gt=0,
        description="change of a plan's experts' factors at which it is done",
    )
    rounds: int = Field(100, ge=1, description="at most; on a GPU, not waited for: always")

    def build(self, experts: int, k: int) -> "SinkhornPlanner":
        """Return what plans."""
        return SinkhornPlanner(self)

    def check_causal(self, key: str) -> None:
        """Raise UserError: a plan is of all tokens of its images."""
        problem = "found sinkhorn, whose plan sees later words and other texts in training"
        raise UserError(f"{key}.kind: {problem}; allowed in a causal text: loss_free, quantile")


class SinkhornPlanner(BalanceModule):
    """It has no state; an image's experts depend in training on the images of its group."""

    def __init__(self, config: Sinkhorn) -> None:
        super().__init__()
        self.config = config

    @property
    def training_group(self) -> int:
        """Images that share a plan."""
        return self.config.group_size

    @torch.no_grad()
    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        if not self.training:
            return logits
        settings = self.config
        shifted = [
            groups + expert_factors(groups, settings.tolerance, settings.rounds).log().unsqueeze(1)
            for groups in group_images(logits, settings.group_size)
        ]
        return torch.cat([groups.reshape(-1, *logits.shape[1:]) for groups in shifted])


def expert_factors(logits: Tensor, tolerance: float, rounds: int) -> Tensor:
    """Return the factors (G, E) of exp(logits), (G, S, E), in the plan of each group.

    plan = tokens' factors · exp(logits) · experts' factors has sums 1/S of its tokens and 1/E of
    its experts. Each group ends at the round in which its factors change by ``tolerance`` or less
    on average. A token's largest logit is subtracted first, which its own factor takes up.
    """
    kernel = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    _, size, experts = kernel.shape
    factors = torch.ones_like(kernel[:, 0])
    going = torch.ones_like(factors[:, :1], dtype=torch.bool)
    for _ in range(rounds):
        tokens = 1 / (size * (kernel @ factors.unsqueeze(-1)) + LEAST)
        changed = 1 / (experts * (kernel.mT @ tokens).squeeze(-1) + LEAST)
        far = (changed - factors).abs().mean(dim=-1, keepdim=True) > tolerance
        factors = torch.where(going, changed, factors)
        going = going & far
        if going.is_cpu and not torch.compiler.is_compiling() and not going.any():
            break
    return factors

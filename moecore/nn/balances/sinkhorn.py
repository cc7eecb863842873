"""Sinkhorn balancing: choose by an even assignment in training (S-BASE; Megatron)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.balances.base import Balance, BalanceModule
from moecore.nn.routers.base import group_images

EPSILON = 1e-8  # added to a divisor


class Sinkhorn(Balance):
    """Choose by exp(logits), rescaled so that all tokens and all experts have even totals.

    This holds in training; evaluation chooses by the logits.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"
    group_size: int = Field(8, ge=1, description="images that share a plan")
    tolerance: float = Field(1e-4, gt=0, description="mean change of factors in a converged plan")
    rounds: int = Field(100, ge=1, description="maximum iterations; always all on a GPU")

    def build(self, experts: int, k: int) -> "SinkhornPlanner":
        return SinkhornPlanner(self)

    def check_causal(self, key: str) -> None:
        raise UserError.at(
            f"{key}.kind",
            found="sinkhorn, whose plan sees later words and other texts in training",
            allowed="loss_free or quantile in causal text",
        )


class SinkhornPlanner(BalanceModule):
    """A balance without state; in training an image's experts depend on the images of its group."""

    def __init__(self, config: Sinkhorn) -> None:
        super().__init__()
        self.config = config

    @property
    def images_coupled_in_training(self) -> int:
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
    """Return the experts' Sinkhorn factors (G, E) for logits (G, S tokens, E) of G groups."""
    # plan = tokens' factors · exp(logits) · experts' factors sums to 1/S per token, 1/E per expert.
    # a token's largest logit only scales its own factor
    kernel = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    _, size, experts = kernel.shape
    factors = torch.ones_like(kernel[:, 0])
    is_active = torch.ones_like(factors[:, :1], dtype=torch.bool)
    for _ in range(rounds):
        tokens = 1 / (size * (kernel @ factors.unsqueeze(-1)) + EPSILON)
        updated = 1 / (experts * (kernel.mT @ tokens).squeeze(-1) + EPSILON)
        has_moved = (updated - factors).abs().mean(dim=-1, keepdim=True) > tolerance
        factors = torch.where(is_active, updated, factors)
        is_active = is_active & has_moved
        if is_active.is_cpu and not torch.compiler.is_compiling() and not is_active.any():
            break
    return factors

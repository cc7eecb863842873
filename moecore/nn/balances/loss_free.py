"""A bias on the choice that follows the load (Wang et al. 2024; DeepSeek-V3).

B images, T tokens per image, E experts.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.ranks import total_over_ranks
from moecore.nn.balances.base import Balance, BalanceModule

Rule = Literal["sign", "recentred", "proportional"]


class LossFree(Balance):
    """Experts that were chosen too often get a lower bias, the others a higher one.

    The bias takes part in the choice in evaluation too, and never in the weights.
    """

    is_alone: ClassVar[bool] = False

    kind: Literal["loss_free"] = "loss_free"
    rate: float = Field(
        1e-3, gt=0, allow_inf_nan=False, description="what a step changes the bias by, in scores"
    )
    rule: Rule = Field(
        "sign",
        description="sign: every bias by the rate; recentred: so too, less the mean of the changes;"
        " proportional: by the rate times the lack of load, in even shares",
    )
    until: float = Field(
        1.0, ge=0, le=1, description="share of the training after which the bias stays as it is"
    )

    def build(self, experts: int, k: int) -> "LossFreeBias":
        """Return the bias of so many experts."""
        return LossFreeBias(self, experts)


class LossFreeBias(BalanceModule):
    """``bias`` (E,), which begins at 0."""

    bias: Tensor

    def __init__(self, config: LossFree, experts: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias

    @torch.no_grad()
    def after_step(self, scores: Tensor, chosen: Tensor, progress: float) -> None:
        """Move the bias against the load of the whole batch."""
        if progress < self.config.until:
            counts = total_over_ranks(chosen.sum(dim=(0, 1)))
            self.bias += self.config.rate * bias_change(counts, self.config.rule)


def bias_change(counts: Tensor, rule: Rule) -> Tensor:
    """Return the change (E,) of the biases, in units of the rate, after choices (E,) int64.

    With n̄ the even share: sign(n̄ − n), that less its mean, or 1 − n/n̄ (2408.15664, algorithm 1;
    the second as torchtitan has it).
    """
    if rule == "proportional":
        return 1 - len(counts) * counts / counts.sum()
    change = torch.sign(counts.sum() - len(counts) * counts).float()  # in whole numbers: exact
    return change - change.mean() if rule == "recentred" else change

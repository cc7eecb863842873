"""Loss-free balancing: a bias per expert follows the load (Wang et al. 2024; DeepSeek-V3)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.ranks import total_over_ranks
from moecore.nn.balances.base import Balance, BalanceModule

Rule = Literal["sign", "recentred", "proportional"]


class LossFree(Balance):
    """Lower the bias of experts that were chosen too often, and raise the bias of other experts.

    The bias shifts the choice in evaluation too, but never the weights.
    """

    is_alone: ClassVar[bool] = False

    kind: Literal["loss_free"] = "loss_free"
    rate: float = Field(1e-3, gt=0, allow_inf_nan=False, description="change per step, in scores")
    rule: Rule = Field(
        "sign",
        description="change of a bias: sign: ± the rate; recentred: minus the mean of these; "
        "proportional: the rate times the missing load, in even shares",
    )
    until: float = Field(1.0, ge=0, le=1, description="share of training when the bias changes")

    def build(self, experts: int, k: int) -> "LossFreeBias":
        return LossFreeBias(self, experts)


class LossFreeBias(BalanceModule):
    """Prefer experts by scores + ``bias`` (E,), initially 0."""

    bias: Tensor

    def __init__(self, config: LossFree, experts: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias

    @torch.no_grad()
    def after_step(self, scores: Tensor, chosen: Tensor, progress: float) -> None:
        if progress < self.config.until:
            counts = total_over_ranks(chosen.sum(dim=(0, 1)))
            self.bias += self.config.rate * compute_bias_change(counts, self.config.rule)


def compute_bias_change(counts: Tensor, rule: Rule) -> Tensor:
    """Return each bias's change (E,), in units of the rate, from the experts' token counts (E,)."""
    # n̄: the mean count. 1 − n/n̄, sign(n̄ − n), or this minus its mean (2408.15664; torchtitan)
    if rule == "proportional":
        return 1 - len(counts) * counts / counts.sum()
    change = torch.sign(counts.sum() - len(counts) * counts).float()  # exact, in integers
    return change - change.mean() if rule == "recentred" else change

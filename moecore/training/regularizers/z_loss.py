"""Router z-loss: keeps router logits small (ST-MoE, Zoph et al. 2022, eq. 5)."""

from typing import Literal

from pydantic import Field
from torch import Tensor, logsumexp

from moecore.core import ranks, routing_records
from moecore.training.regularizers.base import Regularizer, sum_over_layers


class ZLoss(Regularizer):
    """The router z-loss, summed over MoE layers."""

    kind: Literal["z_loss"] = "z_loss"
    weight: float = Field(1e-3, ge=0, description="factor in the objective")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: z_loss(logits=record.logits))


def z_loss(*, logits: Tensor) -> Tensor:
    """Return the mean of logsumexp(logits)² over all ranks' tokens (B, T, E), before noise."""
    return ranks.mean_over_ranks(logsumexp(logits, dim=-1).square())

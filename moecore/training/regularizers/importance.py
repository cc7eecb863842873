"""Importance loss: equal total probability of all experts (Shazeer et al. 2017; V-MoE)."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.statistics.intervals import squared_cv
from moecore.training.regularizers.base import Regularizer, sum_over_layers


class Importance(Regularizer):
    """The importance loss, summed over MoE layers. TGR-MoE calls it the load loss."""

    balances_load: ClassVar[bool] = True

    kind: Literal["importance"] = "importance"
    weight: float = Field(0.005, ge=0, description="factor in the objective")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: importance(probs=record.probs))


def importance(*, probs: Tensor) -> Tensor:
    """Return CV² of the experts' importance, the sum of probs over tokens (V-MoE)."""
    # probs: (B, T, E), clean. From 0 (balance) to E − 1 (one expert). adversarial-moe, eq. 12.
    return squared_cv(ranks.total_over_ranks(probs.sum(dim=(0, 1))))

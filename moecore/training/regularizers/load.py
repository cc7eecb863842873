"""Load loss: equal probability of being chosen for all experts (Shazeer et al. 2017; V-MoE)."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.statistics.intervals import squared_cv
from moecore.training.regularizers.base import Regularizer, sum_over_layers


class Load(Regularizer):
    """The load loss, summed over MoE layers; for routers that give the chance of being chosen."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "load"})
    allowed_with: ClassVar[str] = "a router whose largest logits choose, as noisy_top_k"
    balances_load: ClassVar[bool] = True

    kind: Literal["load"] = "load"
    weight: float = Field(0.005, ge=0, description="factor in the objective")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: load(chances=record.load))


def load(*, chances: Tensor) -> Tensor:
    """Return the squared coefficient of variation of the experts' mean chance of being chosen."""
    # chances: (B, T, E), P(chosen) if the noise were drawn again. A scalar ≥ 0, 0 at balance.
    # The total instead of the mean: the factor cancels.
    return squared_cv(ranks.total_over_ranks(chances.sum(dim=(0, 1))))

"""MoE++'s load balancing loss: experts without a network count less (2410.07348)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import ObjectiveInputs, RoutingRecord
from moecore.training.regularizers.base import Regularizer, check_has_experts, sum_over_layers


class ZeroComputationBalance(Regularizer):
    """MoE++'s load balancing loss for experts with ``zero_computation``, summed over MoE layers."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "zero_computation"})
    allowed_with: ClassVar[str] = "experts with zero_computation"
    balances_load: ClassVar[bool] = True

    kind: Literal["zero_computation_balance"] = "zero_computation_balance"
    weight: float = Field(ge=0, description="factor in the objective; not given in the paper")
    share: float = Field(
        0.75,
        gt=0,
        allow_inf_nan=False,
        description="τ, weight of the choices of experts without a network; a smaller τ makes them "
        "more frequent",
    )

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        experts = step.model.moe.experts
        if experts.networks == experts.choices:
            raise UserError(f"{self.kind}: all experts are networks; allowed: {self.allowed_with}")
        networks, share = experts.networks, self.share
        return sum_over_layers(step, lambda record: zero_computation_loss(record, networks, share))


def zero_computation_loss(record: RoutingRecord, networks: int, share: float) -> Tensor:
    """Return MoE++'s balance loss Σ_e η (weight) · f (all ranks' share) · P (mean prob) (§3.3)."""
    # f: share of tokens that chose e, without gradient; P: its mean prob; η: 1 for the first
    # ``networks`` experts, ``share`` for the others.
    counts = total_over_ranks(record.chosen.sum(dim=(0, 1)))
    probs = total_over_ranks(record.probs.sum(dim=(0, 1)))
    tokens = total_over_ranks(torch.full_like(counts[0], record.chosen[..., 0].numel()))
    factors = torch.full_like(probs, share)
    factors[:networks] = 1
    return (factors * (counts / tokens) * (probs / tokens)).sum()

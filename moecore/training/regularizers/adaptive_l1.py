"""ReMoE's loss: an L1 penalty on ReLU gates, larger for busy experts (Wang et al. 2024)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.core.files import UserError
from moecore.training.regularizers.base import Regularizer, check_has_experts, sum_over_layers


class AdaptiveL1(Regularizer):
    """ReMoE's L1 penalty: λ Σ_layers ``gate_l1_penalty``. The router ``relu`` adapts λ."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "sparsity"})
    allowed_with: ClassVar[str] = "the router relu"
    balances_load: ClassVar[bool] = True

    kind: Literal["adaptive_l1"] = "adaptive_l1"
    weight: float = Field(1.0, ge=0, description="factor in the objective, times the router's λ")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        buffers = step.model.named_buffers()
        weights = [buffer for name, buffer in buffers if name.endswith("router.l1_weight")]
        if not weights:
            raise UserError("adaptive_l1: no router learns its weight; allowed: the router relu")
        k = step.model.moe.scaled_router.k
        return weights[0] * sum_over_layers(step, lambda record: gate_l1_penalty(record, k))


def gate_l1_penalty(record: routing_records.RoutingRecord, k: int) -> Tensor:
    """Return ReMoE's (E/k) Σ_e (n_e/N) mean_i g_ie: n_e of N tokens use e; g: gates (§3.3)."""
    # n_e: how many of the N tokens of all ranks use expert e, without gradient.
    counts = ranks.total_over_ranks(record.chosen.sum(dim=(0, 1)))
    gates = ranks.total_over_ranks(record.combine.sum(dim=(0, 1)))
    tokens = ranks.total_over_ranks(torch.full_like(counts[0], record.chosen[..., 0].numel()))
    return len(counts) / k * (counts / tokens * gates / tokens).sum()

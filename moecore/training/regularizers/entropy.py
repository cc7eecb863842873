"""Entropy of routing: a positive weight makes routers confident, a negative one undecided."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.training.regularizers.base import Regularizer, sum_over_layers


class Entropy(Regularizer):
    """Mean entropy of a token's probs, summed over MoE layers."""

    kind: Literal["entropy"] = "entropy"
    weight: float = Field(0.01, allow_inf_nan=False, description="> 0 lowers entropy, < 0 raises")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        return sum_over_layers(step, lambda record: entropy(probs=record.probs))


def entropy(*, probs: Tensor) -> Tensor:
    """Return the mean over the tokens of all ranks of −Σ_e p_e ln p_e, in nats."""
    # probs: (B, T, E), clean, each token sums to 1. A scalar from 0 (confident) to ln E
    # (undecided). A probability of 0 counts as the smallest normal number, for finite gradients.
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return -ranks.mean_over_ranks((probs * log_probs).sum(dim=-1))

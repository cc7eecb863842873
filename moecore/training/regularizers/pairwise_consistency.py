"""Corresponding patches of two views are routed to the same expert (PRC, §III-B)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.training.regularizers.base import Regularizer, probs_of_paired_tokens


class PairwiseConsistency(Regularizer):
    """The PRC loss, summed over MoE layers. It replaces the balance losses; train without mixup."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "two_views"})

    kind: Literal["pairwise_consistency"] = "pairwise_consistency"
    diagonal: float = Field(5e-3, ge=0, description="of mean (1 − S_ii)²: rewards equal choices")
    off_diagonal: float = Field(5e-2, ge=0, description="of the mean S_ij², i ≠ j: unequal choices")
    special: bool = Field(False, description="pair the class token with itself (on for ImageNet)")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        factors = {"diagonal": self.diagonal, "off_diagonal": self.off_diagonal}
        layers = probs_of_paired_tokens(self.kind, step, self.special)
        return cast(Tensor, sum(pairwise_consistency(*pairs, **factors) for pairs in layers))


def pairwise_consistency(
    first: Tensor, second: Tensor, present: Tensor, *, diagonal: float, off_diagonal: float
) -> Tensor:
    """Return the PRC loss (eq. 4) of ``first`` and ``second``, patches' probs in views 1 and 2.

    diagonal/E · Σ_i (1 − S_ii)² + off_diagonal/(E(E−1)) · Σ_{i≠j} S_ij², S: ``_view_correlation``
    """
    # S = E/#pairs · Σ r₁ r₂ᵀ over all pairs of the global batch (eq. 3). first, second: (B, T', E),
    # both sides of each pair, clean, each token sums to 1; present: (B, T') bool, which pairs
    # exist. ≥ 0; 0 if all pairs are equal, one-hot and balanced over experts, and without pairs.
    experts = first.shape[-1]
    correlation, count = _view_correlation(first, second, present)
    equal = correlation.diagonal()
    unequal = correlation - torch.diag_embed(equal)
    loss = (
        diagonal / experts * (1 - equal).square().sum()
        + off_diagonal / max(experts * (experts - 1), 1) * unequal.square().sum()
    )
    return torch.where(count > 0, loss, 0.0)


def _view_correlation(first: Tensor, second: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the correlation S (E, E) of experts over the pairs of all ranks, and their number."""
    experts = first.shape[-1]
    mask = present[..., None].to(first.dtype)
    with torch.autocast(first.device.type, enabled=False):
        products = (first * mask).flatten(0, -2).T @ second.flatten(0, -2)
    # One collective for both.
    total = ranks.total_over_ranks(torch.cat([products.flatten(), mask.sum()[None]]))
    count = total[-1]
    return total[:-1].view(experts, experts) * (experts / count.clamp(min=1)), count

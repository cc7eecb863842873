"""Jensen–Shannon divergence between corresponding tokens of two views (PRC, §III-B, end)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import ObjectiveInputs
from moecore.training.regularizers.base import Regularizer, probs_of_paired_tokens


class JensenShannon(Regularizer):
    """Jensen–Shannon divergence of corresponding tokens' probs in two views, summed over layers.

    It does not balance the load: add importance and load.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "two_views"})

    kind: Literal["jensen_shannon"] = "jensen_shannon"
    weight: float = Field(5e-3, ge=0, description="our choice of the factor; the paper gives none")
    special: bool = Field(False, description="pair the class token with itself (on for ImageNet)")

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        layers = probs_of_paired_tokens(self.kind, step, self.special)
        return cast(Tensor, sum(jensen_shannon(*pairs) for pairs in layers))


def jensen_shannon(first: Tensor, second: Tensor, present: Tensor) -> Tensor:
    """Return ½ KL(p ‖ m) + ½ KL(q ‖ m) in nats, m = (p + q)/2; mean of all ranks' present pairs."""
    # first, second: (B, T', E), each token sums to 1; present: (B, T') bool, which pairs exist. A
    # scalar from 0 (equal) to ln 2 (no common expert); 0 without pairs. Probabilities of 0 count as
    # the smallest normal number, for finite gradients.
    middle = _finite_log((first + second) / 2)
    gaps = [part * (_finite_log(part) - middle) for part in (first, second)]
    divergence = (gaps[0] + gaps[1]).sum(dim=-1) / 2
    count = present.sum().to(divergence.dtype)
    total = total_over_ranks(torch.stack([torch.where(present, divergence, 0.0).sum(), count]))
    return total[0] / total[1].clamp(min=1)


def _finite_log(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()

"""What a routing metric would be if tokens chose their experts evenly and independently.

It is the value beside which the metric is to be read.

B images, T tokens per image, E experts. Masks are (…, E) bool.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord


@lru_cache(maxsize=4096)
def chance_iou(experts: int, k: int, other: int | None = None) -> float:
    """Expected |A ∩ B| / |A ∪ B| of independent, evenly drawn sets of ``k`` and ``other`` experts.

    other: None for k.  |A ∩ B| = i is hypergeometric:
    Σ_i C(a, i) C(E − a, b − i) / C(E, b) · i / (a + b − i), exact but for the last rounding.
    E = 8 and k = 1: 1/8; k = 2: 1/28 · 1 + 12/28 · 1/3 = 5/28. Two empty sets count as 1.
    Raises UserError unless 0 ≤ k, other ≤ experts.
    """
    a = k
    b = k if other is None else other
    if not (0 <= a <= experts and 0 <= b <= experts):
        raise UserError(
            f"chance: sets of {a} and {b} of {experts} experts; allowed: 0 to {experts}"
        )
    if a == b == 0:
        return 1.0
    ways = (
        (i, comb(a, i) * comb(experts - a, b - i))
        for i in range(max(0, a + b - experts), min(a, b) + 1)
    )
    return sum(i / (a + b - i) * (number / comb(experts, b)) for i, number in ways)


def chance_overlap(before: Tensor, after: Tensor) -> float:
    """``chance_iou`` of each token's own two set sizes, averaged over tokens.

    Masks (…, E) bool of one shape.  For routers whose tokens choose different numbers of experts
    (pruned, expert choice).  Raises UserError where there is no token.
    """
    if before.shape != after.shape or not before.numel():
        shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
        raise UserError(f"chance: masks of shape {shapes}; needed: one shape, with tokens")
    experts = before.shape[-1]
    sizes = torch.stack([mask.sum(dim=-1).flatten() for mask in (before, after)], dim=1)
    pairs, counts = sizes.unique(dim=0, return_counts=True)
    expected = [
        chance_iou(experts, a, b) * count
        for (a, b), count in zip(pairs.tolist(), counts.tolist(), strict=True)
    ]
    return sum(expected) / len(sizes)


def chance_change(before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]) -> list[float]:
    """The routing change 1 − IoU that even, independent draws of the same sizes would show.

    Of the chosen sets, one value a layer.
    """
    return [1 - chance_overlap(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]

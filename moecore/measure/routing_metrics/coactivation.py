"""Which experts tokens choose together (OLMoE, §5.2), over all pairs of a token's experts.

B images, T tokens per image, N = B·T, E experts, k chosen per token.
"""

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.measure.routing_metrics.layer_metrics import linearize_mean


def count_coactivation(chosen: Tensor) -> Tensor:
    """Return how many tokens of each image chose both experts, (B, E, E) fp64; chosen (B, T, E).

    On the diagonal: how many chose the expert.
    """
    ones = chosen.double()
    return ones.mT @ ones


def conditional_coactivation(counts: Tensor) -> Tensor:
    """Return P(b chosen | a chosen), (E, E), rows a, from counts (E, E); the diagonal is 0.

    A row sums to k − 1 where every token chose k experts, and is 0 where no token chose a. By
    chance, at an even load, each is (k − 1)/(E − 1).
    """
    apart = counts - counts.diagonal().diag()
    return apart / _divisors(counts).unsqueeze(-1)


def follow_up_shares(before: Tensor, chosen: Tensor) -> Tensor:
    """Return P(b chosen here | a chosen in the layer before), (E', E) fp64, rows a.

    before: (B, T, E') bool, of the same tokens.  chosen: (B, T, E) bool.  A row is 0 where no token
    chose a. By chance each is P(b).
    """
    first = before.flatten(0, 1).double()
    counts = first.T @ chosen.flatten(0, 1).double()
    return counts / first.sum(dim=0).clamp_min(1).unsqueeze(-1)


def coactivation_lift(counts: Tensor, tokens: int) -> Tensor:
    """Return P(b | a) / P(b), (E, E), from counts (E, E) of so many tokens; 1 if independent.

    A token has only k experts, so the even chance is (k − 1)·E / ((E − 1)·k), below 1.
    """
    return conditional_coactivation(counts) * tokens / _divisors(counts)


def pair_lift_by_image(chosen: Tensor) -> Tensor:
    """Return the mean lift of the pairs that tokens chose as one value an image, (B,) fp64.

    chosen: (B, T, E) bool.  Raises UserError where no token chose two experts.
    """
    experts = chosen.shape[-1]
    rows = count_coactivation(chosen).flatten(1)
    there = rows.any(dim=0)

    def mean_lift(mean: Tensor) -> Tensor:
        counts = torch.zeros_like(there, dtype=mean.dtype).masked_scatter(there, mean)
        counts = counts.view(experts, experts)
        pairs = counts - counts.diagonal().diag()
        return (pairs * coactivation_lift(counts, chosen.shape[1])).sum() / pairs.sum()

    if int(chosen.sum(dim=-1).max()) < 2:
        raise UserError("coactivation: no token chose two experts; allowed: routers of k ≥ 2")
    return linearize_mean(mean_lift, rows)


def _divisors(counts: Tensor) -> Tensor:
    """How many tokens chose each expert, (E,); 1 where none did, whose pairs are 0."""
    return counts.diagonal().where(counts.diagonal() > 0, 1)

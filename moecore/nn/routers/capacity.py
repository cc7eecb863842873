"""Expert capacity, and which choices lie within it (V-MoE, §2, §4)."""

from fractions import Fraction

import torch
from torch import Tensor


def exact_fraction(factor: float) -> Fraction:
    """Return the exact fraction of a decimal: 160 · 1.1 / 4 is then 44, not 44.000000000000007."""
    return Fraction(str(factor))


def ceil_capacity(tokens: int, factor: Fraction, experts: int) -> int:
    """Return ceil(tokens · factor / experts) in integers: compiled graphs have no fractions."""
    return -(-tokens * factor.numerator // (experts * factor.denominator))


def expert_capacity(tokens: int, k: int, factor: Fraction, experts: int) -> int:
    """Return ceil(tokens · k · factor / experts), rounded up to a multiple of 4."""
    return -(-ceil_capacity(tokens * k, factor, experts) // 4) * 4


def within_capacity(
    experts: Tensor, priority: Tensor | None, number: int, factor: Fraction, group_size: int
) -> Tensor:
    """Return whether each choice lies within its expert's capacity, (B, T, k) bool."""
    # All first choices are served before any second choice. Every ``group_size`` images share a
    # capacity; remaining images form a smaller group. experts: (B, T, k), best first. priority:
    # (B, T), higher is served earlier (batch-prioritised routing); None: in the order of tokens.
    within = []
    groups_of_experts = group_images(experts, group_size)
    queues: list[Tensor | None] = [None] * len(groups_of_experts)
    if priority is not None:
        # each token's position in the queue; ties keep the tokens' order
        queues = [
            values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            for values in group_images(priority, group_size)
        ]
    for groups, ranks in zip(groups_of_experts, queues, strict=True):
        capacity = expert_capacity(groups.shape[1], experts.shape[2], factor, number)
        within.append((_places_in_expert(groups, ranks) < capacity).reshape(-1, *experts.shape[1:]))
    return torch.cat(within)


def group_images(values: Tensor, group_size: int) -> list[Tensor]:
    """Return values (B, T, …) as groups (G, S, …) of ``group_size`` images, and the rest."""
    full = len(values) // group_size * group_size
    parts = ((values[:full], group_size), (values[full:], len(values) - full))
    return [part.unflatten(0, (-1, size)).flatten(1, 2) for part, size in parts if len(part)]


def _places_in_expert(experts: Tensor, ranks: Tensor | None) -> Tensor:
    """Return how many choices of the same expert are served before each choice, (G, S, k)."""
    # experts: (G, S, k). ranks: (G, S), each token's position in the queue; None: in order.
    queue = experts
    if ranks is not None:
        places = ranks.unsqueeze(-1).expand_as(experts)
        queue = torch.zeros_like(experts).scatter_(1, places, experts)
    flat = queue.transpose(1, 2).flatten(1)  # (G, k·S): first choices first
    sorted_flat, places = flat.sort(dim=1, stable=True)
    numbers = torch.arange(flat.shape[1], device=flat.device)
    # distance from the first choice of the same expert
    behind = numbers - torch.searchsorted(sorted_flat, sorted_flat)
    before = torch.empty_like(flat).scatter_(1, places, behind)
    positions = before.unflatten(1, (experts.shape[2], -1)).transpose(1, 2)
    if ranks is None:
        return positions
    return positions.gather(1, ranks.unsqueeze(-1).expand_as(experts))

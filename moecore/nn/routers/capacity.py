"""How many tokens an expert takes, and which choices lie within that capacity (V-MoE, §2, §4)."""

from fractions import Fraction

import torch
from torch import Tensor


def exact_fraction(factor: float) -> Fraction:
    """The decimal that was written: 160 · 1.1 / 4 is 44, not 44.000000000000007."""
    return Fraction(str(factor))


def ceil_capacity(tokens: int, factor: Fraction, experts: int) -> int:
    """ceil(tokens · factor / experts), in whole numbers: a compiled graph takes no fractions."""
    return -(-tokens * factor.numerator // (experts * factor.denominator))


def expert_capacity(tokens: int, k: int, factor: Fraction, experts: int) -> int:
    """Return ceil(tokens·k·factor/experts), rounded up to a multiple of 4."""
    return -(-ceil_capacity(tokens * k, factor, experts) // 4) * 4


def within_capacity(
    experts: Tensor, priority: Tensor | None, number: int, factor: Fraction, group_size: int
) -> Tensor:
    """Return which choices lie within their expert's capacity: first choices before any second.

    experts: (B, T, k), each token's experts, best first.  priority: (B, T), higher is served
    earlier (batch-prioritised routing), or None for the tokens' own order.  number: experts E.
    Every ``group_size`` images share a capacity; the images left over at the end form a smaller
    group.  Returns (B, T, k) bool.
    """
    kept = []
    groups_of_experts = group_images(experts, group_size)
    queues: list[Tensor | None] = [None] * len(groups_of_experts)
    if priority is not None:
        queues = [_queue_places(one) for one in group_images(priority, group_size)]
    for groups, ranks in zip(groups_of_experts, queues, strict=True):
        most = expert_capacity(groups.shape[1], experts.shape[2], factor, number)
        kept.append((_places_in_expert(groups, ranks) < most).reshape(-1, *experts.shape[1:]))
    return torch.cat(kept)


def group_images(values: Tensor, group_size: int) -> list[Tensor]:
    """Return values (B, T, …) as groups (G, S, …) of the tokens of ``group_size`` images each; the
    images left over at the end are a smaller group, behind.
    """
    full = len(values) // group_size * group_size
    parts = ((values[:full], group_size), (values[full:], len(values) - full))
    return [part.unflatten(0, (-1, size)).flatten(1, 2) for part, size in parts if len(part)]


def _queue_places(priority: Tensor) -> Tensor:
    """(G, S) priorities to each token's place in the queue; ties keep the tokens' order."""
    return priority.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


def _places_in_expert(experts: Tensor, ranks: Tensor | None) -> Tensor:
    """(G, S, k) experts to how many choices of the same expert are served earlier."""
    queue = experts
    if ranks is not None:
        places = ranks.unsqueeze(-1).expand_as(experts)
        queue = torch.zeros_like(experts).scatter_(1, places, experts)
    flat = queue.transpose(1, 2).flatten(1)  # (G, k·S): choice by choice
    sorted_flat, places = flat.sort(dim=1, stable=True)
    numbers = torch.arange(flat.shape[1], device=flat.device)
    # how far each is behind the first of its expert
    behind = numbers - torch.searchsorted(sorted_flat, sorted_flat)
    before = torch.empty_like(flat).scatter_(1, places, behind)
    positions = before.unflatten(1, (experts.shape[2], -1)).transpose(1, 2)
    if ranks is None:
        return positions
    return positions.gather(1, ranks.unsqueeze(-1).expand_as(experts))

"""How far the load lies with few experts, and how sure a choice is. E experts."""

import numpy as np
import torch
from torch import Tensor

from moecore.measure.routing_metrics.layer_metrics import expert_counts, max_load_violation
from moecore.statistics.crossed import linearize_ratio

SMALLEST = 0.01  # quantile of the margins


def mean_batch_violation(chosen: Tensor, images: int, seed: int = 0) -> float:
    """Return the mean MaxVio over batches of so many images; chosen (B, T, E) bool.

    It falls with the size of a batch. Images are shuffled, as a split may be sorted by class; a
    last incomplete batch is left out, unless it is alone.
    """
    order = np.random.default_rng(seed).permutation(len(chosen))
    whole = order[: max(images, len(chosen) // images * images)]
    batches = [expert_counts(part) for part in chosen[torch.from_numpy(whole)].split(images)]
    return float(np.mean([max_load_violation(counts) for counts in batches if counts.any()]))


def chance_violation(choices: int, experts: int, draws: int = 200, seed: int = 0) -> float:
    """Return the mean MaxVio of so many choices that fall on experts evenly by chance."""
    random = np.random.default_rng(seed)
    counts = random.multinomial(choices, [1 / experts] * experts, draws)
    return float((counts.max(axis=1) * experts / choices - 1).mean())


def cumulative_load_shares(counts: Tensor) -> Tensor:
    """Return the share of the choices that the m most used experts have, m = 1 … E, (E,) fp64.

    m/E at an even load.  counts: (E,).
    """
    ordered = counts.double().sort(descending=True).values
    return ordered.cumsum(dim=0) / ordered.sum()


def choice_margin(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return each token's lowest chosen score − its highest other one, (B, T) fp64.

    scores: (B, T, E), −∞ of what could not be chosen.  Below 0 where the choice was by others, as
    a balance's; NaN where a token chose none, or all that it could.
    """
    scores = scores.double()
    lowest = scores.where(chosen, torch.inf).amin(dim=-1)
    highest = scores.where(~chosen, -torch.inf).amax(dim=-1)
    margin = lowest - highest
    return margin.where(margin.isfinite(), torch.nan)


def margin_values(scores: Tensor, chosen: Tensor) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the margin by image, and the smallest; nothing where no token has one."""
    margins = choice_margin(scores, chosen)
    is_known = margins.isfinite()
    if not is_known.any():
        return {}, {}
    sums = margins.nan_to_num().sum(dim=1), is_known.sum(dim=1)
    return (
        {"margin": linearize_ratio(*(one.numpy() for one in sums))},
        {"smallest_margin": float(np.quantile(margins[is_known].numpy(), SMALLEST))},
    )

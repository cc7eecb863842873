"""Whether two trainings find the same experts: they are matched on some images, compared on others.

B images, T tokens per image, E experts of each training, n tokens.
"""

from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.statistics.people import permuted_orders


class SeedAgreement(NamedTuple):
    """Of two trainings on images that their experts were not matched on."""

    correlation: float  # of matched experts' indicators over tokens, mean over experts
    overlap: float  # share of the first one's choices that the second shares, once matched
    partners: np.ndarray  # (E,) int, of each expert of the first that of the second


def indicator_correlation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation of who chose each expert, (E, E); 0 of one all or none chose.

    ours, theirs: (n, E) bool, of the same tokens.
    """
    sides = []
    for chosen in (ours, theirs):
        apart = chosen - chosen.mean(axis=0)
        length = np.sqrt(np.square(apart).sum(axis=0))
        sides.append(apart / np.where(length > 0, length, np.inf))
    return sides[0].T @ sides[1]


def match_experts(correlation: np.ndarray) -> np.ndarray:
    """Return each expert's partner, (E,), one to one, with the largest sum of correlations."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    return linear_sum_assignment(correlation, maximize=True)[1]


def seed_agreement(ours: np.ndarray, theirs: np.ndarray, is_fit: np.ndarray) -> SeedAgreement:
    """Return how well two trainings' experts agree on the images that they are not matched on.

    ours, theirs: (B, T, E) bool, of the same images.  is_fit: (B,) bool, those that they are
    matched on: agreement on these is biased upwards, as the best of E! matchings.
    Raises UserError where the two differ in images, tokens or experts.
    """
    if ours.shape != theirs.shape:
        shapes = f"{ours.shape} and {theirs.shape} (images, tokens, experts)"
        raise UserError(f"seed_agreement: found choices of {shapes}; allowed: two of one shape")
    experts = ours.shape[-1]
    fit, rest = (
        [side[images].reshape(-1, experts) for side in (ours, theirs)]
        for images in (is_fit, ~is_fit)
    )
    partners = match_experts(indicator_correlation(*fit))
    correlation = indicator_correlation(*rest)[np.arange(experts), partners].mean()
    shared = rest[0] & rest[1][:, partners]
    return SeedAgreement(float(correlation), float(shared.sum() / max(1, rest[0].sum())), partners)


def chance_correlation(
    ours: np.ndarray,
    theirs: np.ndarray,
    is_fit: np.ndarray,
    draws: int = 20,
    seed: int = 0,
    people: np.ndarray | None = None,
) -> float:
    """Return the mean correlation of ``seed_agreement`` with the second one's images exchanged.

    Matched and compared as the real one. What is left is what experts share by place alone.
    people: (B,), whose image each is; people are then exchanged.
    """
    orders = permuted_orders(len(theirs), draws, seed, people)
    null = [seed_agreement(ours, theirs[order], is_fit).correlation for order in orders]
    return float(np.mean(null))

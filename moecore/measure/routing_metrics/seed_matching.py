"""Whether two trainings find the same experts: they are matched on some images, compared on others.

B images, T tokens per image, E experts of each training, n tokens.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.encoded_arrays import decode_compressed_text
from moecore.core.files import UserError
from moecore.statistics.crossed import linearize_ratio
from moecore.statistics.intervals import first_half, permuted_orders


class KeptChoices(Config):
    """Which experts some tokens chose: bits of (images, tokens, experts), by ``encode_arrays``."""

    shape: tuple[int, int, int]
    bits: str
    people: tuple[int, ...] | None = None  # whose image each is, where people have several


def decode_choices(kept: KeptChoices) -> np.ndarray:
    """Return which experts tokens chose, (images, tokens, experts) bool."""
    bits = np.frombuffer(decode_compressed_text(kept.bits), np.uint8)
    return np.unpackbits(bits, count=int(np.prod(kept.shape))).astype(bool).reshape(kept.shape)


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


def matched_agreement_by_image(
    ours: np.ndarray, theirs: np.ndarray, partners: np.ndarray
) -> dict[str, np.ndarray]:
    """Return correlation and overlap of ``seed_agreement`` as one value an image, (B,) each.

    ours, theirs: (B, T, E) bool, of images that the partners (E,) do not come from.  Their means
    are the two; a token moves Pearson's r by z·z' − r·(z² + z'²)/2 of its standard scores.
    """
    theirs = theirs[..., partners]
    scores = []
    for chosen in (ours, theirs):
        mean = chosen.mean(axis=(0, 1))
        spread = np.sqrt(mean * (1 - mean))
        scores.append((chosen - mean) / np.where(spread > 0, spread, np.inf))
    one, other = scores
    correlation = (one * other).mean(axis=(0, 1))
    moved = one * other - correlation * (np.square(one) + np.square(other)) / 2
    shared = (ours & theirs).sum(axis=(1, 2))
    return {
        "correlation": (correlation + moved).mean(axis=(1, 2)),
        "overlap": linearize_ratio(shared, ours.sum(axis=(1, 2))),
    }


class ChanceAgreement(NamedTuple):
    """Means of ``seed_agreement`` over exchanges of the second one's images."""

    correlation: float
    overlap: float


def chance_agreement(
    ours: np.ndarray,
    theirs: np.ndarray,
    is_fit: np.ndarray,
    draws: int = 20,
    seed: int = 0,
    people: np.ndarray | None = None,
) -> ChanceAgreement:
    """Return the mean agreement of ``seed_agreement`` with the second one's images exchanged.

    Matched and compared as the real one. What is left is what experts share by place alone.
    people: (B,), whose image each is; people are then exchanged.
    """
    orders = permuted_orders(len(theirs), draws, seed, people)
    null = [seed_agreement(ours, theirs[order], is_fit) for order in orders]
    return ChanceAgreement(
        float(np.mean([one.correlation for one in null])),
        float(np.mean([one.overlap for one in null])),
    )


class PairAgreement(NamedTuple):
    """Of two seeds of a method: means over layers."""

    correlation: float
    overlap: float
    chance: float  # of the correlation


@cache
def compare_kept_choices(
    ours: tuple[KeptChoices, ...], theirs: tuple[KeptChoices, ...]
) -> PairAgreement:
    """Return how far the layers of two models agree, on the same images."""
    people = None if ours[0].people is None else np.array(ours[0].people)
    is_fit = first_half(ours[0].shape[0], people)
    pairs = zip(ours, theirs, strict=True)
    layers = [(decode_choices(one), decode_choices(other)) for one, other in pairs]
    agreements = [seed_agreement(*layer, is_fit) for layer in layers]
    nulls = [chance_agreement(*layer, is_fit, people=people) for layer in layers]
    return PairAgreement(
        float(np.mean([one.correlation for one in agreements])),
        float(np.mean([one.overlap for one in agreements])),
        float(np.mean([one.correlation for one in nulls])),
    )

"""Differences of two methods, their intervals and p-values, over seeds and items; Holm.

D[s, i] = ours − theirs, for seed s = 1 … S and item i = 1 … n. An item is a test image, or a person
where people have several images. The conclusion is about other seeds and other items, so the
interval covers both choices. docs/intervals.md has the simulations.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.core.arrays_as_text import encode_rounded
from moecore.statistics import intervals

CONFIDENCE_LEVEL = 0.95
POWER = 0.8
OVER_ITEMS_AND_SEEDS = "items × seeds"
OVER_ITEMS = "items"
OVER_SEEDS = "seeds"


class SourceVariance(NamedTuple):
    """Variance of a mean difference that is due to the choice of seeds, or of items."""

    variance: float  # of the mean
    freedom: float  # degrees of freedom of the variance


class Difference(NamedTuple):
    """A mean difference, and the sources of its variance, from which intervals and p follow."""

    value: float
    sources: tuple[SourceVariance, ...]  # seeds, items, both, or () for none
    kind: str  # OVER_ITEMS_AND_SEEDS, OVER_ITEMS, OVER_SEEDS; "" without an interval
    seeds: int
    items: int  # 0 for values without items

    def half_width(self, level: float = CONFIDENCE_LEVEL) -> float | None:
        """Return half the width of the mean's interval, or None if there is no variance source.

        half² = t²·A + u²·B, with A = var(seed means)/S, B = var(item means)/n, and t, u: Student's
        quantile at (1 + level)/2 with S − 1 or n − 1 degrees of freedom (Cochran and Cox's
        weighting of two variances). Exact where A or B is 0. Otherwise
        conservative, because the residual scatter is counted in both A and B.
        """
        if not self.sources:
            return None
        return self._half_width_at_tail((1 - level) / 2)

    def interval(self, level: float = CONFIDENCE_LEVEL) -> intervals.Interval:
        """Return the mean with its limits; without limits if there is no variance source."""
        half = self.half_width(level)
        limits = () if half is None else (self.value - half, self.value + half)
        return intervals.Interval(self.value, *limits)

    def p_at_distance(self, distance: float) -> float | None:
        """Return the two-sided p of a value ``distance`` from the mean; None without sources."""
        if not self.sources:
            return None
        if distance <= 0:
            return 1.0
        if not any(source.variance for source in self.sources):
            return 0.0
        import scipy  # models import this file, and need no statistics

        def gap(log_tail: float) -> float:
            return self._half_width_at_tail(math.exp(log_tail)) - distance

        # With both sources the interval is wider, so this p is at least the larger of the two.
        alone = [
            float(scipy.special.stdtr(source.freedom, -distance / math.sqrt(source.variance)))
            for source in self.sources
            if source.variance > 0
        ]
        log_tail = math.log(max(*alone, 1e-300))
        if gap(log_tail) > 0:
            bracket = (log_tail, math.log(0.5))
            log_tail = scipy.optimize.root_scalar(gap, bracket=bracket, xtol=1e-15).root
        return 2 * math.exp(log_tail)

    def _half_width_at_tail(self, tail: float) -> float:
        """Return half the width of the interval that leaves probability ``tail`` on each side."""
        import scipy

        squares = [
            source.variance * float(scipy.special.stdtrit(source.freedom, tail)) ** 2
            for source in self.sources
            if source.variance > 0
        ]
        return math.sqrt(math.fsum(squares))

    @property
    def p(self) -> float | None:
        """Two-sided p of no difference; None without a variance source."""
        return self.p_at_distance(abs(self.value))

    @property
    def detectable_difference(self) -> float | None:
        """Difference found with 80 % power at the two-sided 5 % level; None without a source."""
        # (t(0.975) + t(0.8)) · standard error, each t with the degrees of freedom of its source.
        half_at_level = self.half_width(CONFIDENCE_LEVEL)
        half_at_power = self.half_width(2 * POWER - 1)
        if half_at_level is None or half_at_power is None:
            return None
        return half_at_level + half_at_power


def linearize_by_person(values: np.ndarray, people: intervals.People) -> np.ndarray:
    """Linearise the mean of images (N,) as a mean over people, (M,), to estimate its variance."""
    # people: (N,), the person of each image. None, or one image per person: ``values`` as they are.
    values = np.asarray(values, np.float64)
    images = intervals.indices_by_person(people)
    if images is None:
        return values
    # The mean over images is a ratio of two sums over people. Its linearisation is
    # v + (n_p / mean n)·(person's mean − v), for a person with n_p images.
    sums = np.array([(values[indices] - values.mean()).sum() for indices in images])
    return values.mean() + sums * len(images) / len(values)


def encode_item_values(values: np.ndarray, people: intervals.People = None) -> str:
    """Encode ``linearize_by_person`` of the images' values (N,) as text, rounded."""
    return encode_rounded(linearize_by_person(values, people))


def linearize_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return r + (above − r·below)/mean(below) per item, (N,); its mean is r = Σ above/Σ below."""
    ratio = above.sum() / below.sum()
    return ratio + (above - ratio * below) / below.mean()


def crossed_difference(differences: np.ndarray) -> Difference:
    """Return the mean of differences (S, n) over seeds and items, with its sources of variance."""
    # One seed: the variance is over items only. Equal values, as of a model that is never right: no
    # interval.
    values = np.asarray(differences, np.float64)
    if values.ndim != 2 or values.shape[0] < 1 or values.shape[1] < 2:
        shape = f"differences of shape {values.shape}"
        raise ValueError(f"crossed: {shape}; (seeds, items ≥ 2) are needed")
    if not np.isfinite(values).all():
        raise ValueError("crossed: differences are not all finite")
    seeds, items = values.shape
    value = float(values.mean())
    if np.ptp(values) == 0:
        return Difference(value, (), "", seeds, items)
    by_items = SourceVariance(float(values.mean(axis=0).var(ddof=1)) / items, items - 1)
    if seeds == 1:
        return Difference(value, (by_items,), OVER_ITEMS, seeds, items)
    by_seeds = SourceVariance(float(values.mean(axis=1).var(ddof=1)) / seeds, seeds - 1)
    return Difference(value, (by_seeds, by_items), OVER_ITEMS_AND_SEEDS, seeds, items)


def headroom_recovered(
    scores: np.ndarray, floor: np.ndarray, ceiling: np.ndarray
) -> Difference | None:
    """Return the share of the gap from ``floor`` to ``ceiling`` that ``scores`` close, each (S, n).

    Means over seeds and items: (scores − floor) / (ceiling − floor), variances by the delta method.
    None unless ceiling − floor is significantly above 0: else the ratio has no bounds (Fieller).
    """
    headroom = crossed_difference(ceiling - floor).interval()
    if headroom.low is None or headroom.low <= 0:
        return None
    return crossed_difference(linearize_ratio(scores - floor, ceiling - floor))


def paired_seed_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of the differences, one per seed (for times or sizes), and its variance."""
    values = np.asarray(differences, np.float64)
    if values.ndim != 1 or not len(values):
        shape = f"differences of shape {values.shape}"
        raise ValueError(f"paired_seed_difference: {shape}; (seeds,) is needed")
    seeds = len(values)
    mean = math.fsum(differences) / seeds
    if seeds == 1:
        return Difference(mean, (), "", 1, 0)
    variance = math.fsum((value - mean) ** 2 for value in differences) / (seeds - 1)
    return Difference(mean, (SourceVariance(variance / seeds, seeds - 1),), OVER_SEEDS, seeds, 0)


class PairedHits(NamedTuple):
    """Numbers of images that both models, one model or neither predicts correctly."""

    both: int
    first_only: int
    second_only: int
    neither: int


def count_paired_hits(first: np.ndarray, second: np.ndarray) -> PairedHits:
    """Count the images that both models, one or neither predicts correctly, from hits (N,) bool."""
    first = np.asarray(first, dtype=bool)
    second = np.asarray(second, dtype=bool)
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        shapes = f"shapes {first.shape} and {second.shape}"
        raise ValueError(f"paired hits: {shapes}; two of one shape (N,), N ≥ 1, are needed")
    both = int((first & second).sum())
    either = int((first | second).sum())
    return PairedHits(both, int(first.sum()) - both, int(second.sum()) - both, len(first) - either)


def mcnemar(first_only: int, second_only: int) -> float:
    """Return McNemar's exact two-sided p (1947) from the images that only one model gets right."""
    import scipy

    if first_only == second_only == 0:
        return 1.0
    # Exact, not mid-p: it keeps its level however few images the models disagree on.
    return float(scipy.stats.binomtest(first_only, first_only + second_only).pvalue)


def compute_newcombe_interval(table: PairedHits, level: float = 0.95) -> intervals.Interval:
    """Return the first model's share minus the second's, with the interval of Newcombe (1998)."""
    # Statistics in Medicine 17, method 10: combines Wilson's limits of both shares, reduced by
    # their correlation φ. Valid for small counts and for shares of 0 and 1.
    both, first_only, second_only, neither = table
    count = sum(table)
    first = _wilson_distances(both + first_only, count, level)
    second = _wilson_distances(both + second_only, count, level)
    margins = (both + first_only) * (second_only + neither) * (both + second_only)
    margins *= first_only + neither
    excess = both * neither - first_only * second_only
    if excess > 0:
        # Newcombe's continuity correction, which must not change the sign.
        excess = max(excess - count / 2, 0.0)
    correlation = excess / math.sqrt(margins) if margins else 0.0  # φ

    def combine(distance: float, other: float) -> float:
        product = 2 * correlation * distance * other
        return math.sqrt(max(0.0, distance * distance - product + other * other))

    below, above = combine(first[0], second[1]), combine(first[1], second[0])
    share = (first_only - second_only) / count
    return intervals.Interval(share, max(-1.0, share - below), min(1.0, share + above))


def bootstrap_interval(
    first: np.ndarray,
    second: np.ndarray,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    people: intervals.People = None,
) -> intervals.Interval:
    """Return the mean of first − second, values (N,) of two models, with its bootstrap interval."""
    # Resamples draw images, or with ``people`` (N,) whole people.
    first = np.asarray(first, dtype=float)
    second = np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1:
        shapes = f"shapes {first.shape} and {second.shape}"
        raise ValueError(f"bootstrap_interval: {shapes}; two of one shape (N,) are needed")
    change = first - second
    mean = lambda chosen: float(change[chosen].mean())
    return intervals.bootstrap_statistic(mean, len(change), resamples, seed, level, people=people)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for a family of comparisons, in the same order (Holm, 1979)."""
    # The i-th smallest of m is multiplied by m − i + 1, is at least its predecessor, and at most 1.
    # Tests with a corrected p below 0.05 hold at 5 % for the whole family.
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def _wilson_distances(successes: int, count: int, level: float) -> tuple[float, float]:
    """Return share − lower limit and upper limit − share of Wilson's interval."""
    value, low, high = intervals.wilson(successes, count, level)
    assert low is not None and high is not None  # Wilson's interval always has both
    return value - low, high - value

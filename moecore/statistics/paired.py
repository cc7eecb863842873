"""Paired comparisons of two models on the same images, and Holm's correction."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.statistics.intervals import Interval, People, bootstrap_interval, wilson


class PairedHits(NamedTuple):
    """The numbers of images that both models, one model or neither gets right."""

    both: int
    first_only: int
    second_only: int
    neither: int


def count_paired_hits(first: np.ndarray, second: np.ndarray) -> PairedHits:
    """Return the 2 × 2 table of two models' hits, (N,) bool each."""
    first = np.asarray(first, dtype=bool)
    second = np.asarray(second, dtype=bool)
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        shapes = f"shapes {first.shape} and {second.shape}"
        raise ValueError(f"paired hits: {shapes}; two of one shape (N,), N ≥ 1, are needed")
    both = int((first & second).sum())
    either = int((first | second).sum())
    return PairedHits(both, int(first.sum()) - both, int(second.sum()) - both, len(first) - either)


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the exact two-sided p of McNemar's test (1947) of equal shares of right images.

    first_only, second_only: numbers of images that only one of the models gets right.
    """
    from scipy.stats import binomtest  # slow to import

    if first_only == second_only == 0:
        return 1.0
    # Exact, not mid-p: it keeps its level however few images the models disagree on.
    return float(binomtest(first_only, first_only + second_only).pvalue)


def paired_share_difference(table: PairedHits, level: float = 0.95) -> Interval:
    """Return the first model's share minus the second's, with the interval of Newcombe (1998).

    Statistics in Medicine 17, method 10: combines Wilson's limits of both shares, reduced by their
    correlation φ. Valid for small counts and for shares of 0 and 1.
    """
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

    def combine(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    below, above = combine(first[0], second[1]), combine(first[1], second[0])
    difference = (first_only - second_only) / count
    return Interval(difference, max(-1.0, difference - below), min(1.0, difference + above))


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    people: People = None,
) -> Interval:
    """Return the mean difference of two models' values (N,) with its paired bootstrap interval.

    Images are drawn, or with ``people`` (N,) whole people. Raises ValueError where the shapes
    differ or there are no images.
    """
    first = np.asarray(first, dtype=float)
    second = np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1:
        shapes = f"shapes {first.shape} and {second.shape}"
        raise ValueError(f"paired_bootstrap: {shapes}; two of one shape (N,) are needed")
    change = first - second
    mean = lambda chosen: float(change[chosen].mean())
    return bootstrap_interval(mean, len(change), resamples, seed, level, people=people)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for a family of comparisons, in the same order (Holm, 1979).

    The i-th smallest of m is multiplied by m − i + 1, is at least its predecessor, and at most 1.
    Tests with a corrected p below 0.05 hold at 5 % for the whole family.
    """
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def _wilson_distances(successes: int, count: int, level: float) -> tuple[float, float]:
    """Return the distances of Wilson's lower and upper limit from the share."""
    value, low, high = wilson(successes, count, level)
    assert low is not None and high is not None  # Wilson's interval always has both
    return value - low, high - value

"""Paired comparisons of two models on the same images, and Holm's correction."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.statistics.intervals import Interval, bootstrap_interval, wilson


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
        raise ValueError(
            f"paired hits: shapes {first.shape} and {second.shape}; two of one shape (N,), N ≥ "
            "1, are needed"
        )
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
    both, first_only, second_only, _ = table
    count = sum(table)
    first = _wilson_distances(both + first_only, count, level)
    second = _wilson_distances(both + second_only, count, level)
    correlation = _hit_correlation(table)
    below = _combine_distances(first[0], second[1], correlation)
    above = _combine_distances(first[1], second[0], correlation)
    difference = (first_only - second_only) / count
    return Interval(difference, max(-1.0, difference - below), min(1.0, difference + above))


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    people: np.ndarray | None = None,
) -> Interval:
    """Return the mean difference of two models' values (N,) with its paired bootstrap interval.

    Images are drawn, or with ``people`` (N,) whole people. Raises ValueError where the shapes
    differ or there are no images.
    """
    first = np.asarray(first, dtype=float)
    second = np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(
            f"paired_bootstrap: shapes {first.shape} and {second.shape}; two of one shape (N,) "
            "are needed"
        )
    change = first - second
    return bootstrap_interval(
        lambda chosen: float(change[chosen].mean()),
        len(change),
        resamples,
        seed,
        level,
        people=people,
    )


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


def _hit_correlation(table: PairedHits) -> float:
    """Return φ of the 2 × 2 table, with a continuity correction; 0 if a margin is empty."""
    both, first_only, second_only, neither = table
    margins = (
        (both + first_only)
        * (second_only + neither)
        * (both + second_only)
        * (first_only + neither)
    )
    if margins == 0:
        return 0.0
    excess = both * neither - first_only * second_only
    if excess > 0:
        # Newcombe's continuity correction, which must not change the sign.
        excess = max(excess - sum(table) / 2, 0.0)
    return excess / math.sqrt(margins)


def _combine_distances(first: float, second: float, correlation: float) -> float:
    return math.sqrt(max(0.0, first * first - 2 * correlation * first * second + second * second))

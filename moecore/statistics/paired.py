"""Two models on the same images, or methods over the same seeds: is the difference chance?

Everything here is paired: what both models get right or wrong says nothing about their difference.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.statistics.intervals import Interval, bootstrap_interval, wilson


class PairedHits(NamedTuple):
    """How many images both models get right, only the first, only the second, and neither."""

    both: int
    first_only: int
    second_only: int
    neither: int


def count_paired_hits(first: np.ndarray, second: np.ndarray) -> PairedHits:
    """The 2 × 2 table of two models' hits (N,) bool; ValueError unless N is the same."""
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
    """Return the exact two-sided p-value of McNemar's test (McNemar, 1947): is an image that one
    model alone gets right as often the first's?

    The exact p and not the mid-p: it never rejects more often than it says, however few images the
    models disagree on. Raises ValueError for negative counts.
    """
    from scipy.stats import binomtest  # slow to import

    if first_only == second_only == 0:
        return 1.0
    return float(binomtest(first_only, first_only + second_only).pvalue)


def paired_share_difference(table: PairedHits, level: float = 0.95) -> Interval:
    """Share of the first model minus that of the second, with the interval of Newcombe (1998,
    Statistics in Medicine 17, method 10).

    It combines Wilson's limits of both shares, less what their correlation φ takes away; valid for
    small counts and for shares of 0 and 1. Its φ has the continuity correction where it is
    positive, and is 0 where a margin is empty.
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
    """Return the mean difference of one number per image (N,) of two models, with the bootstrap
    over images, which stay paired; over people (N,), where they are given and have several.

    Raises ValueError where the shapes differ or there are no images.
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
    """p-values corrected for a family of comparisons (Holm, 1979), in the order given: one below
    0.05 holds at 5 % for all together.

    The i-th smallest of m is multiplied by m − i + 1, is at least its predecessor, and at most 1.
    """
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def _wilson_distances(successes: int, count: int, level: float) -> tuple[float, float]:
    """Return how far Wilson's limits lie below and above a share."""
    value, low, high = wilson(successes, count, level)
    assert low is not None and high is not None  # Wilson's interval always has both
    return value - low, high - value


def _hit_correlation(table: PairedHits) -> float:
    """φ of the 2 × 2 table with Newcombe's continuity correction."""
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
        # Newcombe's continuity correction, which may not turn the sign
        excess = max(excess - sum(table) / 2, 0.0)
    return excess / math.sqrt(margins)


def _combine_distances(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

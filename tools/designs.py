"""Tests that stand beside a claim: over designs, by signs where a seed collapsed, of linearity."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from moecore.statistics.intervals import Interval

MIN_SEEDS = 5  # to tell a collapsed seed from the others
COLLAPSED = 10  # median absolute deviations; 5 marks a seventh of normal samples, too


class RandomEffects(NamedTuple):
    """The mean of several designs, each with another true difference."""

    interval: Interval  # 95 %
    deviation: float  # τ, of the designs' true differences
    p: float  # of one true difference in all designs (Cochran's Q)


def random_effects(values: Sequence[float], variances: Sequence[float]) -> RandomEffects:
    """Return the mean over designs: DerSimonian and Laird's τ², Hartung and Knapp's interval.

    values, variances: of each design's difference. The interval is not made narrower than with the
    variances alone. Raises ValueError for fewer than two designs, or a variance that is not > 0.
    """
    if len(values) < 2 or len(values) != len(variances) or min(variances) <= 0:
        text = f"{len(values)} values and variances {list(variances)}"
        raise ValueError(f"random_effects: found {text}; two or more, variances > 0, are needed")
    effects = np.asarray(values, np.float64)
    weights = 1 / np.asarray(variances, np.float64)
    freedom = len(effects) - 1
    heterogeneity = float((weights * (effects - np.average(effects, weights=weights)) ** 2).sum())
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    between = max(0.0, (heterogeneity - freedom) / float(scale))
    weights = 1 / (1 / weights + between)
    mean = float(np.average(effects, weights=weights))
    inflation = max(1.0, float((weights * (effects - mean) ** 2).sum()) / freedom)
    quantile = float(scipy.special.stdtrit(freedom, 0.975))
    half = quantile * math.sqrt(inflation / float(weights.sum()))
    p = float(scipy.stats.chi2.sf(heterogeneity, freedom))
    return RandomEffects(Interval(mean, mean - half, mean + half), math.sqrt(between), p)


def has_collapsed_seed(values: np.ndarray) -> bool:
    """Return whether a seed's difference (S,) is ``COLLAPSED`` deviations from the median."""
    if len(values) < MIN_SEEDS:
        return False
    apart = np.abs(values - np.median(values))
    return bool(apart.max() > COLLAPSED * np.median(apart) > 0)


def sign_test(values: np.ndarray) -> float:
    """Return the exact two-sided p of as many positive as negative values; zeros are left out."""
    positive, number = int((values > 0).sum()), int((values != 0).sum())
    if number == 0:
        return 1.0
    return float(scipy.stats.binomtest(positive, number).pvalue)


class Linearity(NamedTuple):
    """How far a metric is from a straight line over levels, such as numbers of experts."""

    deviation: float  # the largest, of the means from their least-squares line
    share: float  # of the rise from the first to the last level
    p: float  # that some deviation is a third of the rise or more (two one-sided tests of each)
    p_exact: float  # of no deviation (Hotelling's T²); nan for too few seeds


def measure_linearity(values: np.ndarray, levels: Sequence[float]) -> Linearity:
    """Return the test that values (S, L) of L ≥ 3 levels rise linearly, paired by S ≥ 2 seeds."""
    seeds, number = values.shape
    if seeds < 2 or number < 3 or number != len(levels):
        text = f"values of shape {values.shape} for {len(levels)} levels"
        raise ValueError(f"linearity: found {text}; (seeds ≥ 2, levels ≥ 3) are needed")
    design = np.column_stack([np.ones(number), levels])
    deviations = values - values @ np.linalg.pinv(design).T @ design.T
    third = (values[:, -1] - values[:, 0])[:, None] / 3
    ps = [
        float(scipy.stats.ttest_1samp(third[:, 0] + sign * column, 0, alternative="greater").pvalue)
        for column in deviations.T
        for sign in (1, -1)
    ]
    # The deviations lie in the L − 2 dimensions that are orthogonal to lines.
    basis = np.linalg.svd(design)[0][:, 2:]
    contrasts = values @ basis
    freedom = seeds - basis.shape[1]
    p_exact = math.nan
    if freedom > 0:
        mean = contrasts.mean(axis=0)
        covariance = np.atleast_2d(np.cov(contrasts.T))
        squared = seeds * float(mean @ np.linalg.solve(covariance, mean))
        ratio = squared * freedom / (basis.shape[1] * (seeds - 1))
        p_exact = float(scipy.stats.f.sf(ratio, basis.shape[1], freedom))
    largest = float(np.abs(deviations.mean(axis=0)).max())
    return Linearity(largest, largest / abs(3 * float(third.mean())), max(ps), p_exact)

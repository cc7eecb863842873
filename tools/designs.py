"""Statistics of a claim with several runs: pooled, over designs, by signs, and of linearity.

Runs of one design differ in their seeds alone; they are pooled to one difference, with one p
corrected for looks. A look is an answer given after a run. Simulations: docs/intervals.md. Beside
it stand tests over designs, by signs where a seed collapsed, and of linearity.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from moecore.statistics.comparisons import (
    OVER_ITEMS_AND_SEEDS,
    OVER_SEEDS,
    Difference,
    SourceVariance,
)
from moecore.statistics.intervals import Interval

MIN_P = 1e-300

MIN_SEEDS = 5  # to tell a collapsed seed from the others
COLLAPSED = 10  # median absolute deviations; 5 marks a seventh of normal samples, too


class RandomEffects(NamedTuple):
    """The mean over designs whose true differences vary."""

    interval: Interval  # 95 %
    deviation: float  # τ, standard deviation of the designs' true differences
    p: float  # for an equal true difference in all designs (Cochran's Q)


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

    deviation: float  # largest deviation of a mean from the least-squares line
    share: float  # ``deviation`` / rise from the first to the last level
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


def pool_differences(differences: Sequence[Difference], same_items: bool = True) -> Difference:
    """Return the mean difference over all seeds of the runs of one design, with its variances.

    A run's weight is its number of seeds, the inverse of its variance over seeds, because seeds of
    one design vary alike. The variance over seeds has Satterthwaite's degrees of freedom. With
    ``same_items`` the error by the choice of items is the same in all runs, and does not shrink.
    One run is returned as it is. Raises ValueError for a run without a variance over seeds.
    """
    if len(differences) == 1:
        return differences[0]
    if unfit := {difference.kind for difference in differences} - {
        OVER_ITEMS_AND_SEEDS,
        OVER_SEEDS,
    }:
        text = f"found variances over {sorted(unfit)}; over seeds is needed"
        raise ValueError(f"pool_differences: {text}")
    seeds = sum(difference.seeds for difference in differences)
    weights = np.array([difference.seeds for difference in differences]) / seeds
    value = float(weights @ [difference.value for difference in differences])
    variances, freedoms = np.array([difference.sources[0] for difference in differences]).T
    parts = weights**2 * variances
    freedom = freedoms.sum()
    if parts.sum() > 0:
        freedom = parts.sum() ** 2 / (parts**2 / freedoms).sum()
    sources = [SourceVariance(float(parts.sum()), float(freedom))]
    kind = OVER_SEEDS
    items = max(difference.items for difference in differences)
    if by_items := [run.sources[1] for run in differences if run.kind == OVER_ITEMS_AND_SEEDS]:
        kind = OVER_ITEMS_AND_SEEDS
        largest = max(by_items)  # also of a run that measured no items
        deviations = weights * np.sqrt([(*run.sources, largest)[1].variance for run in differences])
        variance = float((deviations**2).sum())
        if same_items:
            variance = float(deviations.sum()) ** 2
        sources.append(SourceVariance(variance, min(source.freedom for source in by_items)))
    return Difference(value, tuple(sources), kind, seeds, items)


def combined_p(
    differences: Sequence[Difference], null: float, side: float, same_items: bool = True
) -> float:
    """Return one two-sided p of all runs against the difference ``null`` (inverse normal method).

    side: > 0 if the pooled difference is above ``null``, else < 0; p is 1 where the runs' scores
    together point to the other side. Weights are the square roots of the planned numbers of seeds,
    which no result changes. Scores of runs with the same items are correlated by their shares of
    variance over items (Hartung, 1999).
    """
    import scipy  # models import this package, and need no statistics

    if len(differences) == 1:
        p = differences[0].p_at_distance(abs(differences[0].value - null))
        assert p is not None  # a run without an interval is not tested
        return p
    weights = np.sqrt([difference.seeds for difference in differences])
    scores = []
    shares = []
    for difference in differences:
        gap = difference.value - null
        p = difference.p_at_distance(abs(gap))
        assert p is not None
        scores.append(math.copysign(float(scipy.stats.norm.isf(max(p, MIN_P) / 2)), gap))
        variances = [source.variance for source in difference.sources]
        has_shared = same_items and difference.kind == OVER_ITEMS_AND_SEEDS and sum(variances) > 0
        shares.append(variances[1] / sum(variances) if has_shared else 0.0)
    correlations = np.sqrt(np.outer(shares, shares))
    np.fill_diagonal(correlations, 1.0)
    score = float(weights @ scores) / math.sqrt(float(weights @ correlations @ weights))
    if score * side < 0:
        return 1.0
    return 2 * float(scipy.stats.norm.sf(abs(score)))


def correct_for_looks(p: float, looks: int) -> float:
    """Return 2^looks · p, at most 1; the uncorrected p if the claim was answered once.

    Look k may spend α/2ᵏ, so p is multiplied by 2ᵏ: the sum over any number of looks is at most α,
    however dependent they are. Looks that nobody planned have no last one, which the spending of
    O'Brien and Fleming needs to know.
    """
    if looks == 1:
        return p
    return min(1.0, 2.0**looks * p)

"""Pool several runs of one comparison: one difference, and one p corrected for looks.

Runs of one design differ in their seeds alone. A look is an answer given after a run. Simulations:
docs/intervals.md.
"""

import math
from collections.abc import Sequence

import numpy as np

from moecore.statistics.comparisons import BOTH, SEEDS, Difference, VarianceSource

MIN_P = 1e-300


def pool_differences(differences: Sequence[Difference], same_items: bool = True) -> Difference:
    """Return the mean difference over all seeds of the runs of one design, with its variances.

    A run's weight is its number of seeds, the inverse of its variance over seeds, because seeds of
    one design vary alike. The variance over seeds has Satterthwaite's degrees of freedom. With
    ``same_items`` the error by the choice of items is the same in all runs, and does not shrink.
    One run is returned as it is. Raises ValueError for a run without a variance over seeds.
    """
    if len(differences) == 1:
        return differences[0]
    if unfit := {difference.kind for difference in differences} - {BOTH, SEEDS}:
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
    sources = [VarianceSource(float(parts.sum()), float(freedom))]
    kind = SEEDS
    items = max(difference.items for difference in differences)
    if by_items := [run.sources[1] for run in differences if run.kind == BOTH]:
        kind = BOTH
        largest = max(by_items)  # also of a run that measured no items
        deviations = weights * np.sqrt([(*run.sources, largest)[1].variance for run in differences])
        variance = float((deviations**2).sum())
        if same_items:
            variance = float(deviations.sum()) ** 2
        sources.append(VarianceSource(variance, min(source.freedom for source in by_items)))
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
        has_shared = same_items and difference.kind == BOTH and sum(variances) > 0
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

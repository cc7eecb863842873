"""Several runs of one comparison: one estimate, its test, looks, designs and linearity."""

import math

import numpy as np
import pytest
import scipy

from benchmarks.looks import hold_until
from moecore.statistics.comparisons import (
    BOTH,
    ITEMS,
    SEEDS,
    Difference,
    VarianceSource,
    crossed_difference,
    paired_seed_difference,
)
from moecore.statistics.pooling import combined_p, correct_for_looks, pool_differences
from tools.designs import has_collapsed_seed, measure_linearity, random_effects, sign_test

FEW = Difference(0.02, (VarianceSource(4e-4, 3), VarianceSource(1e-4, 99)), BOTH, 4, 100)
MANY = Difference(0.04, (VarianceSource(1e-4, 11), VarianceSource(4e-4, 399)), BOTH, 12, 400)


def test_two_runs_by_hand():
    # Weights 1/4 and 3/4. A = 4e-4/16 + 9e-4/16·1 = 2.5e-5 + 5.625e-5, with Satterthwaite's
    # 8.125e-5² / (2.5e-5²/3 + 5.625e-5²/11) = 13.31 degrees; √B = 0.01/4 + 0.02·3/4 = 0.0175.
    pooled = pool_differences([FEW, MANY])
    assert pooled.value == pytest.approx(0.035)
    by_seeds, by_items = pooled.sources
    assert by_seeds == pytest.approx((8.125e-5, 13.31), rel=1e-3)
    assert by_items == pytest.approx((0.0175**2, 99))
    assert (pooled.kind, pooled.seeds, pooled.items) == (BOTH, 16, 400)
    apart = pool_differences([FEW, MANY], same_items=False)
    assert apart.sources[1].variance == pytest.approx(0.0025**2 + 0.015**2)
    assert pool_differences([FEW]) is FEW


def test_runs_of_drawn_items_are_pooled_as_by_loops_and_without_items_by_seeds():
    generator = np.random.default_rng(5)
    draws = [generator.standard_normal((seeds, 40)) for seeds in (3, 5, 9)]
    runs = [crossed_difference(values) for values in draws]
    pooled = pool_differences(runs)
    by_seeds = squares = root = 0.0  # slowly
    for run in runs:
        by_seeds += (run.seeds / 17) ** 2 * run.sources[0].variance
        squares += ((run.seeds / 17) ** 2 * run.sources[0].variance) ** 2 / (run.seeds - 1)
        root += run.seeds / 17 * math.sqrt(run.sources[1].variance)
    assert pooled.value == pytest.approx(np.concatenate(draws).mean())
    assert pooled.sources[0] == pytest.approx((by_seeds, by_seeds**2 / squares))
    assert pooled.sources[1].variance == pytest.approx(root**2)
    alone = [paired_seed_difference(values.mean(axis=1).tolist()) for values in draws]
    assert pool_differences(alone).kind == SEEDS
    mixed = pool_differences([alone[0], runs[1]])
    assert mixed.sources[1].variance == pytest.approx(runs[1].sources[1].variance)
    flat = pool_differences([paired_seed_difference([0.5, 0.5]), paired_seed_difference([0.5] * 3)])
    assert flat.sources == ((0.0, 3),)
    with pytest.raises(ValueError, match="found variances over .'items'.; over seeds is needed"):
        pool_differences([FEW, crossed_difference(draws[0][:1])])
    assert crossed_difference(draws[0][:1]).kind == ITEMS


def test_the_combination_is_stouffers_for_runs_without_items():
    runs = [paired_seed_difference(list(values)) for values in ([1, 3, 2], [0.5, 1, -0.2, 2, 1.4])]
    tails = [run.p / 2 for run in runs]  # both are above 0
    expected = scipy.stats.combine_pvalues(tails, "stouffer", weights=np.sqrt([3, 5])).pvalue
    assert combined_p(runs, 0.0, 1.0) == pytest.approx(2 * expected)
    assert combined_p(runs, 0.0, -1.0) == 1.0, "the scores are on the other side"
    assert combined_p(runs[:1], 0.0, 1.0) == runs[0].p
    # Nothing but the shared items varies: a second run adds nothing.
    alike = Difference(0.02, (VarianceSource(0.0, 3), VarianceSource(1e-4, 99)), BOTH, 4, 100)
    assert combined_p([alike, alike], 0.0, 1.0) == pytest.approx(alike.p)
    assert combined_p([alike, alike], 0.0, 1.0, same_items=False) < alike.p


def test_each_look_spends_half_of_what_is_left():
    assert [correct_for_looks(0.01, looks) for looks in (1, 2, 3)] == [0.01, 0.04, 0.08]
    assert correct_for_looks(0.3, 2) == 1.0
    spent = sum(0.05 / (correct_for_looks(1e-9, looks) / 1e-9) for looks in range(2, 40))
    assert spent + 0.05 / 2 == pytest.approx(0.05)


def test_asking_until_it_holds_keeps_the_level_with_the_correction_alone():
    last, pooled, corrected, late = hold_until(np.random.default_rng(0), (3, 5, 5, 12), 20_000)
    assert last > 8 and pooled > 6, "the inflation that the correction is for"
    assert corrected < 2.3 and 2.5 < late < 3.5


def test_random_effects_by_hand_and_as_audited():
    # τ² = (Q − 1)/(2 − 2/2) = (2 − 1)/1; then both weights are 1/2, Q = 1 and the error 1.
    effects = random_effects([0.0, 2.0], [1.0, 1.0])
    assert effects.interval == pytest.approx((1.0, 1 - 12.7062, 1 + 12.7062), abs=1e-3)
    assert effects[1:] == pytest.approx((1.0, scipy.stats.chi2.sf(2, 1)))
    values, errors = [1.33, -0.38, -1.77, 0.20, -5.79], [0.17, 0.15, 0.44, 0.25, 0.36]
    effects = random_effects(values, np.square(errors).tolist())
    assert effects.interval == pytest.approx((-1.3, -4.7, 2.2), abs=0.06)
    assert effects.deviation == pytest.approx(2.1, abs=0.1) and effects.p < 1e-16
    for values, variances in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="two or more, variances > 0, are needed"):
            random_effects(values, variances)


def test_a_collapsed_seed_and_the_sign_test():
    years = np.array([0.6, 0.7, 0.8, 0.75, 0.9, 1.1, 0.65, 0.5, 26.5])
    assert has_collapsed_seed(years) and not has_collapsed_seed(years[:-1])
    assert not has_collapsed_seed(years[-4:]) and not has_collapsed_seed(np.ones(6))
    assert sign_test(years) == pytest.approx(2 / 2**9) and sign_test(np.zeros(3)) == 1.0


def test_linearity():
    noise = 0.05 * np.random.default_rng(1).standard_normal((6, 4))
    levels = np.array([1.0, 2.0, 4.0, 6.0])
    straight = measure_linearity(5 + levels + noise, levels)
    assert straight.p < 0.01 < straight.p_exact and straight.share < 0.05
    # 0, 3, 0, 1: the least-squares line is 0.9661 + 0.0102 k, 2.0136 below the second value
    bent = measure_linearity(np.array([0.0, 3.0, 0.0, 1.0]) + noise, levels)
    assert bent.p > 0.05 > bent.p_exact
    assert (bent.deviation, bent.share) == pytest.approx((2.0136, 2.0136), rel=0.1)
    assert math.isnan(measure_linearity(5 + levels + noise[:2], levels).p_exact)
    with pytest.raises(ValueError, match=r"values of shape \(6, 4\) for 3 levels"):
        measure_linearity(noise, levels[:3])

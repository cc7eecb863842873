import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.statistics.intervals import Interval, bootstrap, over_seeds, wilson

KNOWN = [
    (8, 10, 0.4902, 0.9433),
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (50, 100, 0.4038, 0.5962),
]


@pytest.mark.parametrize(("successes", "count", "low", "high"), KNOWN)
def test_wilson_against_published_values(successes, count, low, high):
    assert wilson(successes, count) == (
        successes / count,
        pytest.approx(low, abs=5e-5),
        pytest.approx(high, abs=5e-5),
    )


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_share_inside_zero_and_one(case):
    share, low, high = wilson(*case)
    assert 0 <= low <= share <= high <= 1


@pytest.mark.parametrize("case", [(3, 2), (-1, 2), (0, 0)])
def test_wilson_refuses(case):
    with pytest.raises(ValueError, match="wilson"):
        wilson(*case)


def test_over_seeds_by_hand():
    # Mean 2, deviation 1, t(0.975, 2) = 4.3027: 2 ± 4.3027 / √3.
    assert over_seeds([1, 2, 3]) == (
        2,
        pytest.approx(2 - 2.4841, abs=1e-4),
        pytest.approx(2 + 2.4841, abs=1e-4),
    )
    assert over_seeds([0.7]) == Interval(0.7)
    with pytest.raises(ValueError, match="no values"):
        over_seeds([])


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = bootstrap(lambda chosen: values[chosen].mean(), 400)
    half = 1.96 * values.std() / 20
    assert found == (
        pytest.approx(values.mean()),
        pytest.approx(values.mean() - half, abs=0.05),
        pytest.approx(values.mean() + half, abs=0.05),
    )
    assert (
        found
        == bootstrap(lambda chosen: values[chosen].mean(), 400)
        != bootstrap(lambda chosen: values[chosen].mean(), 400, seed=1)
    )


def test_bootstrap_reflects_a_biased_statistic():
    # |mean| of data around 0 is biased upward; so are its resamples, and the reflected interval
    # lies lower than their quantiles.
    values = np.random.default_rng(0).normal(0.01, 1, 200)
    found = bootstrap(lambda chosen: abs(values[chosen].mean()), 200, lowest=0.0)
    assert found.low == 0 and found.high <= 2 * found.value

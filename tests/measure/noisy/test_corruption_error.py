"""Mean corruption error relative to a baseline: fixtures worked by hand, and what is refused."""

import pytest

from moecore.core.files import UserError
from moecore.measure.noisy.corruption_error import (
    mean_corruption_error,
    relative_corruption_error,
)

DENSE = {"snow": {1: 0.2, 5: 0.6}, "fog": {1: 0.1, 5: 0.1}}
OURS = {"snow": {1: 0.1, 5: 0.3}, "fog": {1: 0.3, 5: 0.1}}


def test_equal_errors_give_one():
    assert mean_corruption_error(DENSE, DENSE) == pytest.approx(1) and relative_corruption_error(
        DENSE, 0.05, DENSE, 0.05
    ) == pytest.approx(1)


def test_it_is_the_mean_of_ratios_of_sums():
    # snow 0.4 / 0.8 = 0.5, fog 0.4 / 0.2 = 2; a mean of ratios at each severity would be
    # (0.5 + 0.5 + 3 + 1) / 4
    assert mean_corruption_error(OURS, DENSE) == pytest.approx(1.25)
    assert mean_corruption_error(DENSE, OURS) == pytest.approx((2 + 0.5) / 2)


def test_the_relative_error_takes_each_models_own_clean_error_off():
    # snow (0.4 − 0.1) / (0.8 − 0.16), fog (0.4 − 0.1) / (0.2 − 0.16)
    assert relative_corruption_error(OURS, 0.05, DENSE, 0.08) == pytest.approx(
        (0.3 / 0.64 + 0.3 / 0.04) / 2
    )


def test_a_baseline_without_error_is_refused():
    with pytest.raises(UserError, match="fog adds no error to the baseline"):
        mean_corruption_error(OURS, {**DENSE, "fog": {1: 0.0, 5: 0.0}})
    assert mean_corruption_error(OURS, {**DENSE, "fog": {1: 0.0, 5: 0.2}}) == pytest.approx(1.25), (
        "one severity without error is no matter"
    )
    with pytest.raises(UserError, match="fog"):
        relative_corruption_error(OURS, 0.05, DENSE, 0.1)


@pytest.mark.parametrize(
    "other",
    [{"snow": DENSE["snow"]}, {**DENSE, "fog": {1: 0.1}}, {**DENSE, "frost": {1: 0.1, 5: 0.2}}, {}],
)
def test_both_need_the_same_corruptions(other):
    with pytest.raises(UserError, match="the same corruptions and severities"):
        mean_corruption_error(OURS, other)
    with pytest.raises(UserError, match="the same corruptions and severities"):
        mean_corruption_error(other, OURS)


def test_nothing_measured_is_refused():
    with pytest.raises(UserError, match="at least one"):
        mean_corruption_error({}, {})

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.brain.age_errors import age_table, decade, drawn_weights, errors_by, statistics
from moecore.brain.conformal import conformal_radius, one_each
from moecore.core.files import UserError
from moecore.statistics.intervals import Estimate


def drawn(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    generator = np.random.default_rng(seed)
    ages = generator.uniform(50, 90, n)
    return ages, 20 + 0.7 * ages + generator.normal(0, 3, n), [f"p{number}" for number in range(n)]


def test_a_case_by_hand():
    # ages 60, 70, 80; predictions 64, 69, 77: errors 4, −1, −3, so the MAE is 8/3.
    # slope: (−10·64 + 10·77) / 200 = 130/200 = 0.65; intercept: 70 − 0.65·70 = 24.5.
    # errors have mean 0; corr: (−10·4 + 10·−3) / √(200 · (16 + 1 + 9)) = −70/√5200.
    found = age_table([60, 70, 80], {"raw": np.array([64.0, 69, 77])}, ["a", "b", "c"], 100)["raw"]
    assert found.mae.value == pytest.approx(8 / 3) and found.slope.value == pytest.approx(0.65)
    assert found.intercept.value == pytest.approx(24.5) and found.corr.value == pytest.approx(
        -70 / np.sqrt(5200)
    )


@given(st.integers(0, 500))
def test_a_weight_is_a_volume_taken_as_often(seed):
    generator = np.random.default_rng(seed)
    ages, predictions, _ = drawn(8, seed)
    weights = generator.multinomial(8, np.full(8, 1 / 8), size=1).astype(float)
    taken = np.repeat(np.arange(8), weights[0].astype(int))
    y, p = ages[taken], predictions[taken]
    if len(set(y)) < 3:
        return
    found = {name: value[0] for name, value in statistics(predictions, ages, weights).items()}
    slope, intercept = np.polyfit(y, p, 1)
    assert found["slope"] == pytest.approx(slope, rel=1e-6) and found["intercept"] == pytest.approx(
        intercept, rel=1e-6, abs=1e-5
    )
    assert found["mae"] == pytest.approx(np.abs(p - y).mean()) and found["corr"] == pytest.approx(
        np.corrcoef(p - y, y)[0, 1], abs=1e-7
    )


def test_intervals_hold_the_value_and_are_of_the_right_width():
    # The mean of 400 |errors| with standard deviation s has a 95 % interval of about ± 1.96·s/√400.
    ages, predictions, people = drawn(400)
    found = age_table(ages, {"raw": predictions}, people, 2000)["raw"]
    spread = np.abs(predictions - ages).std() / 20 * 1.96
    assert found.mae.value - found.mae.low == pytest.approx(
        spread, rel=0.12
    ) and found.mae.high - found.mae.value == pytest.approx(spread, rel=0.12)
    assert (
        all(interval.low < interval.value < interval.high for _, interval in found)
        and found.corr.low >= -1
    )


def test_limits_are_reflected():
    # One error of 20 among 30 of 1: resamples are skewed to the right, so the reflected interval
    # reaches further down than up.
    ages = np.linspace(50, 80, 30)
    found = age_table(
        ages,
        {"raw": ages + np.where(np.arange(30) == 7, 20.0, 1.0)},
        [str(number) for number in range(30)],
        2000,
    )["raw"].mae
    assert found.value - found.low > 1.3 * (found.high - found.value)


def test_participants_are_resampled_not_sessions():
    # Four copies of each volume under the same participant add nothing: the interval is that of the
    # volumes once, not half as wide.
    ages, predictions, people = drawn()
    once = age_table(ages, {"raw": predictions}, people, 500)["raw"]
    four = age_table(np.tile(ages, 4), {"raw": np.tile(predictions, 4)}, people * 4, 500)["raw"]
    for name, estimate in once:
        assert getattr(four, name).model_dump() == pytest.approx(estimate.model_dump())
    weights = drawn_weights(["a", "b", "a", "c"], 50)
    assert (
        (weights[:, 0] == weights[:, 2]).all()
        and (weights[:, [0, 1, 3]].sum(1) == 3).all()
        and len(np.unique(weights[:, 0])) > 1
    )


def test_all_variants_meet_the_same_resamples():
    ages, predictions, people = drawn()
    found = age_table(
        ages, {"raw": predictions, "same": predictions, "moved": predictions + 5}, people, 200
    )
    assert found["raw"] == found["same"] and found["moved"].slope.model_dump() == pytest.approx(
        found["raw"].slope.model_dump()
    )
    assert found["moved"].intercept.value == pytest.approx(found["raw"].intercept.value + 5)


def test_perfect_predictions_have_no_correlation_to_speak_of():
    ages, _, people = drawn()
    found = age_table(ages, {"raw": ages}, people, 100)["raw"]
    assert (
        found.mae.value == 0
        and found.slope.value == pytest.approx(1)
        and found.corr == Estimate(value=0.0)
    )


def test_errors_by_group():
    # F: errors 2, −4 → MAE 3, mean −1; M: one participant with errors 1 and 3 → MAE 2, mean 2, no
    # limits.
    rows = errors_by(
        ["F", "M", "F", "M"],
        [60, 60, 70, 80],
        {"raw": np.array([62.0, 61, 66, 83])},
        ["a", "b", "c", "b"],
        300,
    )
    assert [(row.group, row.n, row.participants, row.mean_age) for row in rows] == [
        ("F", 2, 2, 65.0),
        ("M", 2, 1, 70.0),
    ]
    assert (
        rows[0].raw.mae.value == 3
        and rows[0].raw.mean_error.value == -1
        and rows[0].raw.mae.low is not None
    )
    assert rows[1].raw.mae == Estimate(value=2.0) and rows[1].raw.mean_error.value == 2


@pytest.mark.parametrize(
    ("age", "expected"),
    [(60, "60–69"), (69.99, "60–69"), (70, "70–79"), (5, "0–9"), (100.5, "100–109")],
)
def test_decades(age, expected):
    assert decade(age) == expected


@pytest.mark.parametrize(
    ("ages", "predictions"),
    [([], []), ([60, 60], [60, 61]), ([60, np.nan], [60, 61]), ([60, 70], [np.inf, 61])],
)
def test_refusals(ages, predictions):
    with pytest.raises(UserError, match="calibrate: "):
        age_table(
            np.array(ages, float),
            {"raw": np.array(predictions, float)},
            ["a", "b"][: len(ages)],
            100,
        )


def test_the_radius_by_hand():
    # n = 9: the ⌈10 · 0.9⌉ = 9th smallest of |residuals| is the largest; n = 19: the 18th of 19; n
    # = 8 has no 9th.
    assert (
        conformal_radius(np.array([1, -9, 3, 4, 5, 6, 7, 8, 2.0])) == 9
        and conformal_radius(np.arange(1.0, 20)) == 18
    )
    assert (
        conformal_radius(np.ones(8)) is None
        and conformal_radius(np.arange(1.0, 5), 0.5) == 3
        and conformal_radius([]) is None
    )
    with pytest.raises(UserError, match="NaN"):
        conformal_radius(np.array([1.0, np.nan]))


def test_the_radius_covers_new_values():
    # Over 2000 draws of 39 residuals the share of covered new values is 36/40 = 0.9 exactly in
    # expectation; ± 3·√(0.9·0.1/2000) = 0.02.
    generator = np.random.default_rng(0)
    covered = [
        abs(generator.standard_t(3)) <= conformal_radius(generator.standard_t(3, 39))
        for _ in range(2000)
    ]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)


def test_one_volume_a_participant():
    assert one_each(["a", "b", "a", "c", "b"]) == [0, 1, 3]

"""Errors of predicted numbers, by hand and on lines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.tasks.errors import absolute_error, age_fit, mae, median_mae

AGES = torch.tensor([60.0, 70.0, 80.0])


def test_absolute_errors_by_hand():
    prediction = torch.tensor([[61.0], [68.0], [83.0]])
    found = absolute_error(prediction, AGES)
    assert found.dtype == torch.float64 and found.tolist() == [1.0, 2.0, 3.0]
    assert mae(prediction, AGES) == 2.0
    assert mae(prediction[:, 0], AGES) == 2.0  # (N,) too, and never an N × N table


def test_the_fit_by_hand():
    # y = 60 70 80, ŷ = 64 70 73: errors 4 0 −7; centred y −10 0 10; centred errors 5 1 −6 (mean −1)
    # slope = 1 + (−10·5 + 10·(−6)) / 200 = 0.45 ; intercept = mean ŷ 69 − 0.45 · 70 = 37.5
    # corr = −110 / sqrt(200 · (25 + 1 + 36)) = −0.98781
    found = age_fit(torch.tensor([[64.0], [70.0], [73.0]]), AGES)
    assert found == pytest.approx(
        {"mae": 11 / 3, "corr": -110 / (200 * 62) ** 0.5, "slope": 0.45, "intercept": 37.5}
    )


@given(
    st.lists(st.floats(18, 100), min_size=3, max_size=30),
    st.floats(0.1, 2),
    st.floats(-20, 20),
    st.integers(0, 99),
)
def test_the_fit_is_numpys(ages, slope, intercept, seed):
    labels = np.array(ages)
    if np.ptp(labels) < 1:
        return
    predicted = intercept + slope * labels + np.random.default_rng(seed).normal(0, 3, len(labels))
    found = age_fit(torch.tensor(predicted), torch.tensor(labels))
    expected = np.polyfit(labels, predicted, 1)
    assert (found["slope"], found["intercept"]) == pytest.approx(tuple(expected), abs=1e-6)
    assert found["corr"] == pytest.approx(np.corrcoef(predicted - labels, labels)[0, 1], abs=1e-9)


def test_one_answer_for_all_has_slope_0_and_correlation_minus_1():
    assert age_fit(torch.full((3, 1), 65.0), AGES) == pytest.approx(
        {"mae": 25 / 3, "corr": -1.0, "slope": 0.0, "intercept": 65.0}
    )


def test_perfect_and_shifted_predictions_have_no_correlation():
    assert age_fit(AGES, AGES) == {"mae": 0.0, "corr": 0.0, "slope": 1.0, "intercept": 0.0}
    assert age_fit(AGES + 3, AGES) == pytest.approx(
        {"mae": 3.0, "corr": 0.0, "slope": 1.0, "intercept": 3.0}
    )


def test_the_median_is_the_middle_of_an_even_number():
    # median of 50 60 70 90 is 65; errors 5 and 15
    assert median_mae(torch.tensor([90.0, 50.0, 60.0, 70.0]), torch.tensor([60.0, 80.0])) == 10.0


@pytest.mark.parametrize(
    ("prediction", "labels", "said"),
    [
        (torch.zeros(3, 2), AGES, "images, 1"),
        (torch.zeros(2, 1), AGES, "images, 1"),
        (torch.zeros(1, 3), AGES, "images, 1"),
        (torch.zeros(0, 1), torch.zeros(0), "at least one"),
        (torch.tensor([1.0, torch.nan, 2.0]), AGES, "image 1 .* finite"),
        (AGES, torch.tensor([1.0, 2.0, torch.inf]), "image 2 .* finite"),
    ],
)
def test_what_cannot_be_is_refused(prediction, labels, said):
    with pytest.raises(UserError, match=said):
        age_fit(prediction, labels)


def test_a_slope_needs_labels_that_differ():
    with pytest.raises(UserError, match="all 3 labels are 70"):
        age_fit(AGES, torch.full((3,), 70.0))
    with pytest.raises(UserError, match="no training labels"):
        median_mae(torch.zeros(0), AGES)

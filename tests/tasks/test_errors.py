"""Errors of predicted numbers, by hand and on lines.

What an attack makes large, and how two models' scores of the same images are compared.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.statistics.paired import paired_bootstrap, paired_difference, pairs
from moecore.tasks.classification import Classification
from moecore.tasks.errors import absolute_error, age_fit, mae, median_mae
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.regression import Regression

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


TWO = Classification(classes=("a", "b"))
SETS = MultiLabel(classes=("a", "b", "c"))
YEARS = Regression(target="age", unit="years", mean=50.0, deviation=10.0)


def test_cross_entropy_of_classes_by_hand():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
    found = TWO.attack_loss(logits, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


def test_cross_entropy_of_several_labels_is_summed_over_classes():
    # σ(0) = 1/2 and σ(ln 3) = 3/4. Labels {0, 2} of logits (0, ln 3, ln 3): ln 2 + ln 4 + ln 4/3;
    # a mean would be a third of it.
    logits = torch.tensor([[0.0, math.log(3), math.log(3)]])
    found = SETS.attack_loss(logits, torch.tensor([[1, 0, 1]], dtype=torch.uint8))
    assert found.tolist() == pytest.approx([math.log(2) + math.log(4) + math.log(4 / 3)])


def test_floating_labels_are_shares_of_mixed_images():
    logits = torch.tensor([[0.0, math.log(3)]])
    found = TWO.attack_loss(logits, torch.tensor([[0.25, 0.75]]))
    assert found.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)])


@pytest.mark.parametrize("task", [TWO, SETS])
def test_labels_of_another_form_are_refused(task):
    for labels in (torch.rand(2), torch.ones(2, 4, dtype=torch.uint8), torch.ones(1, 2)):
        with pytest.raises(ValueError, match="labels are"):
            task.attack_loss(torch.zeros(2, task.outputs), labels)


def test_absolute_error_by_hand():
    # In the target's unit, whatever the deviation that the training loss is divided by.
    said = torch.tensor([[40.0], [71.5], [60.0]])
    assert YEARS.attack_loss(said, torch.tensor([45.0, 70.0, 60.0])).tolist() == [5, 1.5, 0]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (1, 3), (2, 1)])
def test_predictions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"one number an image, \(3, 1\)"):
        YEARS.attack_loss(torch.zeros(shape), torch.zeros(3))


def test_differences_are_paired():
    # Shares: 3 of 4 against 1 of 4. Numbers: 3, 0, 3 against 1, 1, 1 is 1 more on average.
    one = torch.tensor([1, 1, 1, 0]).bool()
    other = torch.tensor([1, 0, 0, 0]).bool()
    expected = paired_difference(pairs(one.numpy(), other.numpy()))
    assert TWO.difference(one, other) == expected and expected.value == 0.5
    errors = torch.tensor([3.0, 0.0, 3.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    assert YEARS.difference(errors, ones) == paired_bootstrap(errors.numpy(), np.ones(3))
    assert YEARS.difference(errors, ones).value == 1
    wide = YEARS.difference(errors, ones, level=0.999)
    assert wide.low <= YEARS.difference(errors, ones).low

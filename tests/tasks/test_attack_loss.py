"""What an attack makes large, and how two models' scores of the same images are compared."""

import math

import numpy as np
import pytest
import torch

from moecore.statistics.paired import paired_bootstrap, paired_difference, pairs
from moecore.tasks.classification import Classification
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.regression import Regression

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

"""Steps along a noise ramp and routing change by image, against values worked by hand.

Mean corruption error relative to a baseline: fixtures worked by hand, and what is refused.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord
from moecore.measure.noisy.noise import (
    changes_by_image,
    mean_corruption_error,
    ramp_steps,
    relative_corruption_error,
    true_probability,
)
from moecore.measure.routing_metrics.expert_use import change_of_choice


def two_classes(*first: float) -> torch.Tensor:
    """One ramp (1, S + 1, 2) from the first class's probability."""
    p = torch.tensor(first, dtype=torch.float64)
    return torch.stack([p, 1 - p], dim=-1)[None]


def record(chosen: torch.Tensor) -> RoutingRecord:
    values = chosen.float()
    return RoutingRecord(values, values, values, chosen.bool(), values)


def test_one_fall():
    # steps 0, 0.7 and 0.05
    steps = ramp_steps(two_classes(0.9, 0.9, 0.2, 0.25), torch.tensor([0]), 0.1)
    assert steps.class_changes.tolist() == [1] and steps.jumps.tolist() == [1]
    assert steps.total_variation.tolist() == pytest.approx(
        [0.75]
    ) and steps.largest_step.tolist() == pytest.approx([0.7])


def test_the_true_class_is_each_images_own():
    probs = torch.tensor(
        [[[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], [[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]],
        dtype=torch.float64,
    )
    steps = ramp_steps(probs, torch.tensor([1, 2]), 0.1)
    assert true_probability(probs, torch.tensor([1, 2])).tolist() == [[0.2, 0.2], [0.1, 0.7]]
    assert steps.class_changes.tolist() == [1, 1], "the prediction changes for both"
    assert steps.jumps.tolist() == [0, 1] and steps.total_variation.tolist() == pytest.approx(
        [0, 0.6]
    )


def test_back_and_forth_counts_every_time():
    steps = ramp_steps(two_classes(0.75, 0.25, 0.75, 0.25), torch.tensor([0]), 0.25)
    assert (
        steps.class_changes.tolist() == [3]
        and steps.jumps.tolist() == [3]
        and steps.total_variation.tolist() == [1.5]
    )


def test_a_jump_is_more_than_the_threshold():
    probs = two_classes(0.5, 0.625, 0.75, 1.0)  # exact in binary: steps 0.125, 0.125 and 0.25
    assert ramp_steps(probs, torch.tensor([0]), 0.125).jumps.tolist() == [1]
    assert ramp_steps(probs, torch.tensor([0]), 0.1).jumps.tolist() == [3]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.floats(0.01, 0.9))
def test_bounds(points, threshold):
    steps = ramp_steps(two_classes(*points), torch.tensor([0]), threshold)
    variation, largest, jumps = (
        float(steps.total_variation),
        float(steps.largest_step),
        int(steps.jumps),
    )
    assert abs(points[-1] - points[0]) <= variation + 1e-9, "at least the way from start to end"
    assert largest <= variation + 1e-9 <= largest * (len(points) - 1) + 2e-9
    assert (
        jumps * threshold <= variation + 1e-9
        and 0 <= jumps <= len(points) - 1
        and (jumps > 0) == (largest > threshold)
    )


def test_a_ramp_without_a_step_is_refused():
    with pytest.raises(UserError, match="two points are needed"):
        ramp_steps(two_classes(0.5), torch.tensor([0]), 0.1)


def test_change_of_each_image():
    before = torch.tensor([[[1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]])
    after = torch.tensor([[[1, 0, 1], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]])
    # image 0: {0,1} and {0,2} share 1 of 3, the other token stays: 1 − (1/3 + 1)/2; image 1:
    # nothing shared, and two empty sets
    (found,) = changes_by_image([record(before)], [record(after)])
    assert found.tolist() == pytest.approx([1 / 3, 1 / 2])


def test_the_mean_over_images_is_the_routing_change():
    generator = torch.Generator().manual_seed(0)
    before, after = (
        [record(torch.rand(7, 5, 4, generator=generator) < 0.4) for _ in range(3)] for _ in range(2)
    )
    means = [float(layer.mean()) for layer in changes_by_image(before, after)]
    assert means == pytest.approx(change_of_choice(before, after)) and len(means) == 3
    assert changes_by_image([], []) == []


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

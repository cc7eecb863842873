"""A row of a sweep, by hand."""

import pytest
import torch

from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.setting_row import setting_values
from moecore.statistics.intervals import wilson
from moecore.tasks.classification import Classification

LOGITS, LABELS = (
    torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 0.0]]),
    torch.tensor([0, 1, 1, 0]),
)  # three of four are right
TASK = Classification(classes=("a", "b"))
SCORES = torch.tensor(
    [
        [[0.9, 0.6, 0.75, 0.1]],
        [[0.8, 0.1, 0.2, 0.3]],
        [[0.5, 0.4, 0.3, 0.2]],
        [[0.1, 0.2, 0.9, 0.6]],
    ]
)


def record(scores: torch.Tensor, *chosen: str) -> RoutingRecord:
    mask = torch.tensor([[[mark == "x" for mark in token]] for token in chosen])
    probs = scores / scores.sum(-1, keepdim=True)
    return RoutingRecord(scores, probs, mask.float(), mask, probs * mask)


FIRST = record(
    SCORES, "x.x.", "x...", "xx..", "..xx"
)  # counts 3, 1, 2, 1: mean 7/4, mean of squares 15/4
SECOND = record(
    torch.ones(4, 1, 4) / 5, *("xx..",) * 4
)  # counts 4, 4, 0, 0; no preference, none above 0.5


def test_without_a_threshold():
    found = setting_values(LOGITS, LABELS, TASK, [FIRST, SECOND], k=2, threshold=None)
    assert (found.score, found.low, found.high) == wilson(3, 4)
    cv2 = [15 / 4 / (7 / 4) ** 2 - 1, 1.0]
    assert [layer.load_cv2 for layer in found.layers] == pytest.approx(
        cv2
    ) and found.load_cv2 == pytest.approx(sum(cv2) / 2)
    # Outside the best two: (0.6 + 0.1)/2.35, 0.3/1.4, 0.5/1.4, 0.3/1.8; in the second layer 1/2.
    tails = [(0.7 / 2.35 + 0.3 / 1.4 + 0.5 / 1.4 + 0.3 / 1.8) / 4, 0.5]
    assert (
        [layer.tail_mass for layer in found.layers]
        == pytest.approx(tails)
        == [layer.tail_of_probs for layer in found.layers]
    )
    # Outside the chosen the second token has 0.6/1.4, as it chose one expert only.
    assert found.layers[0].unchosen_mass == pytest.approx(tails[0] + 0.3 / 1.4 / 4)
    assert (
        found.entropy == pytest.approx((found.layers[0].entropy + 0.5) / 2)
        and found.fallback is None
    )


def test_with_a_threshold():
    found = setting_values(LOGITS, LABELS, TASK, [FIRST, FIRST], k=2, threshold=0.5)
    # Above 0.5: three, one, none and two scores.
    assert found.fallback == 0.25 and found.below_k == 0.5
    assert found.tail_mass == pytest.approx(
        0.6 / 2.25 / 3
    ) and found.tail_of_probs == pytest.approx((0.7 / 2.35 + 0.3 / 1.4 + 0.5 / 1.4 + 0.3 / 1.8) / 4)


def test_a_layer_without_eligible_experts_leaves_no_mean():
    found = setting_values(LOGITS, LABELS, TASK, [FIRST, SECOND], k=2, threshold=0.5)
    assert (
        found.tail_mass is None
        and found.layers[0].tail_mass is not None
        and found.fallback == (0.25 + 1) / 2
    )

"""What even draws would give: held against counting all pairs of sets."""

from itertools import combinations

import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.chance import chance_change, chance_iou, chance_overlap
from moecore.measure.routing_metrics.expert_use import change_of_choice, iou


def slow_iou(experts: int, k: int, other: int) -> float:
    pairs = [
        (set(a), set(b))
        for a in combinations(range(experts), k)
        for b in combinations(range(experts), other)
    ]
    return sum(len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 6])
def test_against_all_pairs_of_sets(experts):
    for k in range(experts + 1):
        assert chance_iou(experts, k) == pytest.approx(slow_iou(experts, k, k))
        for other in range(experts + 1):
            assert (
                chance_iou(experts, k, other)
                == pytest.approx(slow_iou(experts, k, other))
                == pytest.approx(chance_iou(experts, other, k))
            )


def test_by_hand():
    # One of E: 1/E. Two of 8: of 28 sets one is the same (IoU 1), 2 · 6 = 12 share one expert
    # (IoU 1/3): (1 + 4)/28.
    assert chance_iou(8, 1) == pytest.approx(1 / 8) and chance_iou(8, 2) == pytest.approx(5 / 28)
    assert (
        chance_iou(8, 8) == 1
        and chance_iou(8, 0) == 1
        and chance_iou(8, 0, 3) == 0
        and chance_iou(8, 8, 2) == pytest.approx(2 / 8)
    )
    values = [chance_iou(400, k) for k in (1, 2, 10, 200, 400)]
    assert values == sorted(values) and values[0] == pytest.approx(1 / 400)


@pytest.mark.parametrize("sizes", [(9, 2), (2, 9), (-1, 2)])
def test_sets_that_cannot_be_are_refused(sizes):
    with pytest.raises(UserError, match="allowed: 0 to 8"):
        chance_iou(8, *sizes)


def masks(*rows: str) -> torch.Tensor:
    return torch.tensor([[[mark == "x" for mark in row] for row in rows]])


def test_each_token_has_its_own_sizes():
    before, after = masks("xx..", "x...", "....", "xx.."), masks("x...", "...x", "....", "..xx")
    # (2, 1) of 4: 1/2 · 1/2 = 1/4; (1, 1): 1/4; both empty: 1; (2, 2): (1 + 4 · 1/3)/6 = 7/18.
    assert chance_overlap(before, after) == pytest.approx((1 / 4 + 1 / 4 + 1 + 7 / 18) / 4)
    weights = before.float()
    layers = [[RoutingRecord(weights, weights, weights, side, weights)] for side in (before, after)]
    assert (
        chance_change(*layers) == pytest.approx([1 - chance_overlap(before, after)])
        and chance_change((), ()) == []
    )
    for wrong in ((before, after[:, :2]), (before[:, :0], after[:, :0])):
        with pytest.raises(UserError, match="needed: one shape, with tokens"):
            chance_overlap(*wrong)


def test_random_sets_come_near_it():
    generator = torch.Generator().manual_seed(0)
    before, after = (
        torch.zeros(1, 20_000, 6)
        .scatter(2, torch.rand(1, 20_000, 6, generator=generator).argsort(-1)[..., :2], 1)
        .bool()
        for _ in range(2)
    )
    # standard error of 0.002
    assert iou(before, after) == pytest.approx(chance_iou(6, 2), abs=0.01)
    record = [
        RoutingRecord(*(before.float(),) * 3, chosen=side, combine=before.float())
        for side in (before, after)
    ]
    assert change_of_choice([record[0]], [record[1]]) == pytest.approx(
        chance_change([record[0]], [record[1]]), abs=0.01
    )

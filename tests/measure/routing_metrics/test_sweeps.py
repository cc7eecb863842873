"""The trained weights under other settings of the router.

A row of a sweep, by hand.
"""

import copy

import pytest
import torch

from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.setting_row import setting_values
from moecore.measure.routing_metrics.sweeps import (
    Sample,
    Sweep,
    Sweeps,
    over_k,
    over_threshold,
    sweep,
    with_router,
)
from moecore.nn.predict import predictions
from moecore.statistics.intervals import wilson
from moecore.tasks.classification import Classification
from tests.routed import KINDS, METHODS, tiny

IMAGES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(3))
SAMPLE = Sample(IMAGES, torch.arange(12) % 2, Classification(classes=("a", "b")))
WITH_K = [name for name in KINDS if METHODS[name].router.kind != "soft_slots"]
ERMOE = [name for name in KINDS if METHODS[name].router.kind == "eigenbasis"]


@pytest.mark.parametrize("name", KINDS)
def test_the_same_setting_gives_the_same_model(name):
    model = tiny(name)
    other = with_router(model, model.moe.router)
    assert other is not model and other.moe == model.moe and other.training == model.training
    (ours, first), (theirs, second) = predictions(model, IMAGES, 12), predictions(other, IMAGES, 12)
    assert torch.equal(ours, theirs) and all(
        torch.equal(a.combine, b.combine) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", WITH_K)
def test_every_router_with_k_has_a_sweep_and_the_model_stays(name):
    model = tiny(name).train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    router, rows = model.moe.router, over_k(model, SAMPLE, (1, 2, 8, 9), 12)
    assert [row.k for row in rows] == [1, 2, 8] and [row.own for row in rows] == [
        False,
        True,
        False,
    ], "9 of 8 experts cannot be"
    assert (
        model.moe.router is router and model.training and torch.equal(torch.get_rng_state(), random)
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    tails = [
        row.layers[0].tail_of_probs for row in rows
    ]  # the first layer's tokens and probs do not depend on k
    assert (
        0 <= tails[1] <= tails[0] <= 1 - 1 / 8 + 1e-6
        and tails[1] <= 1 - 2 / 8 + 1e-6
        and tails[2] == 0
    )
    assert all(
        0 <= row.load_cv2 <= 7 + 1e-9 and 0 <= row.score <= 1 and row.low <= row.score <= row.high
        for row in rows
    )
    if METHODS[name].router.kind != "eigenbasis":
        assert (
            rows[2].load_cv2 == 0
            and rows[2].entropy == pytest.approx(1)
            and rows[2].unchosen_mass == 0
        ), "all experts for every token"


@pytest.mark.parametrize("name", ["vmoe", "stable_moe", "teacher_routed", "hash_moe", "ermoe"])
def test_the_changed_model_really_chooses_k(name):
    model = tiny(name)
    _, records = predictions(with_router(model, model.moe.router.with_k(3)), IMAGES, 12)
    numbers = torch.stack([record.chosen.sum(-1) for record in records])
    assert numbers.max() == 3 and (METHODS[name].router.kind == "eigenbasis" or numbers.min() == 3)


@pytest.mark.parametrize("name", ERMOE)
def test_a_higher_threshold_falls_back_more_often(name):
    model = tiny(name)
    rows = over_threshold(model, SAMPLE, (-1.0, 0.1, 0.5, 0.9, 1.0), 12)
    fallback, below = (
        [getattr(row.layers[0], key) for row in rows] for key in ("fallback", "below_k")
    )  # the first layer's tokens stay the same
    assert (
        fallback == sorted(fallback)
        and below == sorted(below)
        and fallback[-1] == 1
        and fallback[0] == below[0] == 0
    )
    assert all(a <= b for a, b in zip(fallback, below, strict=True)) and fallback[1] < fallback[3]
    own = next(row for row in rows if row.own)
    assert (
        own.threshold == 0.5 == model.moe.router.threshold
        and [row.own for row in rows].count(True) == 1
    )
    assert rows[-1].tail_mass is None and rows[0].tail_mass > 0


def test_the_threshold_reaches_the_choice():
    model = tiny("ermoe")
    numbers = []
    for threshold in (-1.0, 0.5):
        _, records = predictions(
            with_router(model, model.moe.router.model_copy(update={"threshold": threshold})),
            IMAGES,
            12,
        )
        numbers.append(records[0].chosen.sum(-1).float().mean())
    assert numbers[0] == 2 > numbers[1]


def test_routers_without_the_setting_have_no_rows():
    settings = Sweeps(k=(1, 2), threshold=(0.1,))
    assert sweep(tiny("soft_moe"), SAMPLE, settings, 12) == Sweep(k=(), threshold=())
    vmoe = sweep(tiny("vmoe"), SAMPLE, settings, 12)
    assert len(vmoe.k) == 2
    assert vmoe.threshold == ()


@pytest.mark.parametrize("name", ["vmoe", "expert_choice"])
def test_no_row_depends_on_the_batch(name):
    whole, parts = (over_k(tiny(name), SAMPLE, (1, 2), batch) for batch in (12, 5))
    for a, b in zip(whole, parts, strict=True):
        for one, other in ((a, b), *zip(a.layers, b.layers, strict=True)):
            expected = other.model_dump(exclude={"layers"})
            assert one.model_dump(exclude={"layers"}) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("wrong", [{"k": [0]}, {"threshold": [1.5]}, {"images": 0}, {"kk": [1]}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="Sweeps"):
        Sweeps(**wrong)


LOGITS, LABELS = (
    torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 0.0]]),
    torch.tensor([0, 1, 1, 0]),
)  # three of four are right
TASK = Classification(classes=("a", "b"))
SCORE = TASK.interval(TASK.scores(LOGITS, LABELS))
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
    found = setting_values(SCORE, [FIRST, SECOND], k=2, threshold=None)
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
    found = setting_values(SCORE, [FIRST, FIRST], k=2, threshold=0.5)
    # Above 0.5: three, one, none and two scores.
    assert found.fallback == 0.25 and found.below_k == 0.5
    assert found.tail_mass == pytest.approx(
        0.6 / 2.25 / 3
    ) and found.tail_of_probs == pytest.approx((0.7 / 2.35 + 0.3 / 1.4 + 0.5 / 1.4 + 0.3 / 1.8) / 4)


def test_a_layer_without_eligible_experts_leaves_no_mean():
    found = setting_values(SCORE, [FIRST, SECOND], k=2, threshold=0.5)
    assert (
        found.tail_mass is None
        and found.layers[0].tail_mass is not None
        and found.fallback == (0.25 + 1) / 2
    )

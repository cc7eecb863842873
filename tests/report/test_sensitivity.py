"""The control of every study: whether a learned router is told from a fixed hash."""

import pytest

from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.claims.sensitivity import (
    ControlPair,
    describe_sensitivity,
    excludes_zero,
    find_control_pair,
    list_unasked_controls,
)
from moecore.report.tables.first_sentence import first_sentence
from moecore.statistics.intervals import Interval
from moecore.study.sections import Question
from tests.report.test_first_sentence import AGES, FIRST, SECOND, THIRD, study

MLP = {"kind": "mlp", "number": 8}
LEARNED = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": MLP}
HASH = {"router": {"kind": "hash", "k": 2}, "experts": MLP}
SETTINGS = """
methods:
  tgr: {router: {kind: noisy_top_k, k: 2}, experts: {kind: mlp, number: 8}}
  vmoe: {router: {kind: noisy_top_k, k: 2}, experts: {kind: mlp, number: 8}}
  hash_moe: {router: {kind: hash, k: 2}, experts: {kind: mlp, number: 8}}
"""


@pytest.mark.parametrize(
    ("methods", "pair"),
    [
        ({"tgr": LEARNED, "vmoe": LEARNED, "h": HASH, "dense": None}, ("vmoe", "h")),
        ({"tgr": LEARNED, "h": HASH}, ("tgr", "h")),
        ({"vmoe": LEARNED | {"router": {"kind": "noisy_top_k", "k": 1}}, "h": HASH}, None),
        ({"vmoe": LEARNED | {"experts": MLP | {"number": 4}}, "h": HASH}, None),
        ({"vmoe": LEARNED | {"model": {"width": 32}}, "h": HASH}, None),
        ({"vmoe": LEARNED | {"blocks": "all"}, "h": HASH}, None),
        ({"vmoe": LEARNED | {"pretrain": {"learning_rate": 0.1}}, "h": HASH}, ("vmoe", "h")),
        ({"vmoe": LEARNED, "dense": {}}, None),
    ],
)
def test_the_pair_differs_in_its_router_alone(methods, pair):
    assert find_control_pair(methods) == (pair and ControlPair(*pair))


@pytest.mark.parametrize(
    ("learned", "fixed", "shown"),
    [
        (FIRST, SECOND, "+10.0 pp [+7.5 to +12.5]: these data can tell routers apart"),
        (SECOND, FIRST, "−10.0 pp [−12.5 to −7.5]: these data can tell routers apart"),
        # Differences −0.01, −0.1, 0.02: −0.03 ± 4.3027 · 0.0624 / √3
        (SECOND, THIRD, "−3 pp [−19 to +13]: these data are not shown to tell routers apart"),
        ((0.6,), (0.5,), ""),  # one seed without items has no interval
    ],
)
def test_the_first_sentence_ends_with_what_the_data_can_show(learned, fixed, shown):
    results = study(settings=SETTINGS, tgr=learned, vmoe=learned, hash_moe=fixed)
    described = describe_sensitivity(results, results.phases["pretrain"])
    assert described == (shown and f"vmoe − hash_moe = {shown}")
    assert first_sentence(results).endswith(f"; {described}." if shown else "vmoe.")


def test_the_control_is_asked_once_and_judged():
    results = study(AGES, settings=SETTINGS, vmoe=SECOND, hash_moe=FIRST)
    (control,) = list_unasked_controls(results, [])
    assert (control.metric, control.better) == ("test_mae", "lower")
    assert list_unasked_controls(results, [control]) == []
    other = Question(**control.model_dump() | {"method": "hash_moe", "against": "vmoe"})
    assert list_unasked_controls(results, [other]) == [control]
    (answer,) = evaluate_claims([control], results)
    assert answer.verdict == "holds" and answer.difference.value == pytest.approx(-0.1)
    assert list_unasked_controls(study(settings=SETTINGS, vmoe=[0.1], hash_moe=[0.2]), []) == []
    assert list_unasked_controls(study(settings=SETTINGS, vmoe=SECOND, tgr=FIRST), []) == []


@pytest.mark.parametrize(
    ("interval", "excludes"),
    [
        (Interval(1.0, 0.5, 1.5), True),
        (Interval(-1.0, -1.5, -0.5), True),
        (Interval(0.1, -0.5, 1.5), False),
        (Interval(0.1, 0.0, 0.2), False),
        (Interval(1.0), False),
    ],
)
def test_an_interval_that_touches_zero_tells_nothing(interval, excludes):
    assert excludes_zero(interval) is excludes

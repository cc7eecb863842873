"""The control of every study: whether a learned router is told from a fixed hash."""

import pytest

from moecore.core.source_layout import ROOT
from moecore.report.claims.answers import collect_answers
from moecore.report.claims.evaluation import (
    ControlPair,
    describe_sensitivity,
    evaluate_claims,
    excludes_zero,
    find_control_pair,
    list_unasked_controls,
)
from moecore.report.tables.terminal_summary import first_sentence
from moecore.statistics.intervals import Interval
from moecore.study.questions import load_rounds
from moecore.study.sections import Question
from tests.report.test_first_sentence import AGES, FIRST, SECOND, THIRD, study
from tools import data_sensitivity
from tools.pooled_claims import PooledAnswer

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


@pytest.fixture(scope="module")
def stored():
    """The rounds of this repository, their answers, and the controls of their data."""
    rounds = load_rounds(ROOT)
    studies, answers = collect_answers(rounds)
    return rounds, answers, data_sensitivity.find_controls(rounds, studies)


def test_the_control_of_stored_answers_is_of_the_same_data_and_training(stored):
    rounds, answers, controls = stored
    named = {study.name: study for study in rounds}
    sensitive = {
        name: data_sensitivity.describe_round(named[name], controls)
        for name in ("ours/dialects", "tgr/tables_4_to_7", "prc/tables_2_4_5")
    }
    assert "= +17.0 pp [+15.8 to +18.3] in ours/" in sensitive["ours/dialects"]
    assert "these data can tell routers apart (pretrain)" in sensitive["ours/dialects"]
    assert "in ours/controls: these data are not shown" in sensitive["tgr/tables_4_to_7"]
    assert sensitive["prc/tables_2_4_5"] == ""  # no hash was trained there


def test_decided_claims_about_accuracy_are_counted_as_insensitive(stored):
    rounds, answers, controls = stored
    decided = [
        answer._replace(entry=answer.entry | {"verdict": "holds", "verdict_holm": "holds"})
        for answer in answers
        if answer.entry
    ]
    marked = data_sensitivity.mark_insensitive(
        [PooledAnswer(answer) for answer in decided], rounds, controls
    )
    counted = {
        (each.answer.study, each.answer.claim.metric): each.answer.entry.get("insensitive")
        for each in marked
    }
    assert "ours/controls" in counted["tgr/tables_4_to_7", "test_accuracy"]
    assert counted["prc/tables_2_4_5", "test_accuracy"] == data_sensitivity.UNKNOWN
    assert counted["ours/dialects", "test_accuracy"] is None
    assert counted["prc/tables_2_4_5", "match_top1_layer_1"] is None  # not about accuracy
    verdicts = {
        data_sensitivity.counted_verdict(each.answer) == "insensitive"
        for each in marked
        if "insensitive" in each.answer.entry
    }
    assert verdicts == {True}
    undecided = marked[0].answer._replace(
        entry=marked[0].answer.entry | {"insensitive": "why", "verdict_holm": "open"}
    )
    assert data_sensitivity.counted_verdict(undecided) == "not significant"

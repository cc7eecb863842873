"""Beside a verdict: the report's first sentence, the control of every study, earlier runs."""

import json
from collections import Counter

import numpy as np
import pytest

from moecore.core.files import UserError, write_atomic
from moecore.measure.pixel_baselines import LOGISTIC, Baselines
from moecore.measure.training import Trained, collect_outcome_values
from moecore.measure.values import Found, Value
from moecore.report.claims import evaluation, items_and_dates
from moecore.report.claims.answers import collect_answers, collect_corrected_answers
from moecore.report.claims.evaluation import ControlPair, build_control_questions, excludes_zero
from moecore.report.page.sections import build_table_with_baselines
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.report.tables.metrics_by_method import build_table, compare_methods
from moecore.report.tables.terminal_summary import best_guess, headline_rows, main_result_sentence
from moecore.statistics import intervals
from moecore.statistics.comparisons import (
    OVER_ITEMS_AND_SEEDS,
    OVER_SEEDS,
    Difference,
    SourceVariance,
)
from moecore.study import papers
from moecore.study.questions import load_rounds
from moecore.study.run_and_claims import Claim, Question, design_digest
from moecore.tasks import MultiLabel, NextToken, Regression, Task
from tests.project import ROOT
from tests.report import generated
from tests.report.test_claims import claim
from tools import data_sensitivity, designs, pooled_claims
from tools.earlier_answers import derive_variances
from tools.pooled_claims import PooledAnswer, Run, judge_runs, load_earlier_answers
from tools.reader_answers import MethodRow, methods_table

AGES = Regression(target="age", unit="years", mean=60.0, deviation=10.0)
CONTROL = "methods: {tgr: {}, vmoe: {}, told: {router: {kind: told}}}"


def study(task: Task = generated.TASK, settings: str = "", **scores) -> StudyResults:
    """A phase whose methods have these test scores, one per seed, without items."""
    models = {}
    for method, values in scores.items():
        models[method] = {}
        for seed, value in enumerate(values):
            changes = {"task": task, "test_score": generated.estimate(value, value - 0.1, value)}
            changes["median_mae"] = 9.0 if task is AGES else None
            outcome = generated.trained(0, 0, False, "pretrain").model_copy(update=changes)
            models[method][seed] = ModelResults({Trained: collect_outcome_values(outcome)})
    return StudyResults({"pretrain": PhaseResults("pretrain", CARD, task, models)}, settings)


CARD = generated.card("pretrain")
# Differences 0.1, 0.11, 0.09: ± 4.3027 · 0.01 / √3 = 0.0248; of the third 0.09, 0.01, 0.11
FIRST, SECOND, THIRD = (0.6, 0.61, 0.59), (0.5, 0.5, 0.5), (0.51, 0.6, 0.48)
RISING = (0.465, 0.5, 0.535)
LEAD = "tgr is 10.0 percentage points more accurate than vmoe (95 % interval 7.5 – 12.5)"
LOWER = "of tgr is 0.100 {} lower than that of vmoe (95 % interval 0.075 – 0.125)"
NONE = "no difference in accuracy is shown between tgr and"
GUESS = "no method is shown to beat a guess (always T-shirt, the most frequent class)"  # 1 / 6
APART = (
    "tgr is 30.0 percentage points more accurate than vmoe (their 95 % intervals do not overlap)"
)
CASES = (
    (
        study(tgr=FIRST, vmoe=SECOND, prc=THIRD),
        f"{LEAD}; no difference is shown between tgr and prc",
    ),
    (study(tgr=FIRST, prc=THIRD), f"{NONE} prc"),
    # t = 0.1 · √3 / 0.035 = 4.95, p = 0.038, after Holm's correction 0.077
    (study(tgr=[0.6] * 3, vmoe=RISING, prc=RISING[::-1]), f"{NONE} vmoe and prc"),
    (study(tgr=[0.9], vmoe=[0.6]), APART),  # one seed: 0.8 – 0.9 and 0.5 – 0.6, then 0.75 – 0.85
    (study(tgr=[0.9], vmoe=[0.85]), f"{NONE} vmoe"),
    (study(tgr=[0.9]), "the accuracy of tgr is 90.0 % (80.0 – 90.0)"),
    (study(tgr=[0.2]), f"the accuracy of tgr is 20.0 % (10.0 – 20.0); {GUESS}"),
    (study(AGES, tgr=SECOND, vmoe=FIRST), f"the mean absolute error {LOWER.format('years')}"),
    (
        study(NextToken(words=9), tgr=SECOND, vmoe=FIRST),
        f"the cross-entropy {LOWER.format('nats per token')}",
    ),
)


@pytest.mark.parametrize(("results", "finding"), CASES)
def test_only_what_a_test_shows_is_said(results, finding):
    assert main_result_sentence(results).partition("): ")[2] == f"{finding}."


def test_controls_are_named_and_not_compared():
    found = study(settings=CONTROL, vmoe=SECOND, tgr=FIRST, told=FIRST)
    start = "2 methods on Fashion-MNIST (vmoe and tgr; not compared: told; 3 seeds): "
    assert main_result_sentence(found) == f"{start}{LEAD}."
    assert main_result_sentence(StudyResults({})) == "Nothing was trained; calculated: nothing."


def test_a_guess_is_the_best_constant_answer_and_ends_the_table():
    results = study(tgr=[0.2], vmoe=[0.9])  # intervals 0.1 – 0.2, around 1 / 6, and 0.8 – 0.9
    (phase,) = results.phases.values()
    table = build_table(results, phase)
    column = next(column for column in table.metrics if column.name == "test_accuracy")
    linear = Value(metric="baseline", at={"classifier": LOGISTIC}, value=0.25, low=0.2, high=0.3)
    fitted = Found(values=(linear,), facts={"images": 4000})
    phase = phase._replace(together={Baselines: fitted})
    grid = build_table_with_baselines(phase, [column], table.cells, ())
    assert [line.items[0].note for line in grid.lines] == ["not shown to beat a guess", ""]
    assert [line.items[0].text for line in grid.foot] == ["16.7 %", "25.0 %"]
    assert grid.foot[1].items[0].small == "20.0 – 30.0"
    assert grid.foot[1].head.note == "on the pixels of 4,000 training images"
    results = results._replace(phases={"pretrain": phase})
    assert main_result_sentence(results).endswith("; logistic regression on pixels reaches 25.0 %.")
    compared = compare_methods(results)
    assert compared["baselines"]["pretrain"][LOGISTIC]["mean"] == 0.25
    assert [row["method"] for row in headline_rows(compared)] == ["tgr", "vmoe"]
    counts = {"test": dict.fromkeys(generated.CLASSES, 100) | {"Coat": 400}}
    phase = phase._replace(card={**CARD, "counts": counts, "images": {"test": 600}})
    assert best_guess(phase) == (400 / 900, "always Coat, the most frequent class")
    several = MultiLabel(classes=generated.CLASSES)  # an image may have several of them
    assert best_guess(phase._replace(task=several)).value == 400 / 600
    assert best_guess(phase._replace(task=NextToken(words=9))).value == pytest.approx(np.log(9))
    (ages,) = study(AGES, tgr=[2.0]).phases.values()
    assert best_guess(ages) == (9.0, "always the median age")


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
    assert evaluation.find_control_pair(methods) == (pair and ControlPair(*pair))


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
    described = evaluation.describe_whether_routers_differ(results, results.phases["pretrain"])
    assert described == (shown and f"vmoe − hash_moe = {shown}")
    assert main_result_sentence(results).endswith(f"; {described}." if shown else "vmoe.")


def test_the_control_is_asked_once_and_judged():
    results = study(AGES, settings=SETTINGS, vmoe=SECOND, hash_moe=FIRST)
    (control,) = build_control_questions(results, [])
    assert (control.metric, control.better) == ("test_mae", "lower")
    assert build_control_questions(results, [control]) == []
    other = Question(**control.model_dump() | {"method": "hash_moe", "against": "vmoe"})
    assert build_control_questions(results, [other]) == [control]
    (answer,) = evaluation.evaluate_claims([control], results)
    assert answer.verdict == "holds" and answer.difference.value == pytest.approx(-0.1)
    assert build_control_questions(study(settings=SETTINGS, vmoe=[0.1], hash_moe=[0.2]), []) == []
    assert build_control_questions(study(settings=SETTINGS, vmoe=SECOND, tgr=FIRST), []) == []


@pytest.mark.parametrize(
    ("interval", "excludes"),
    [
        *((intervals.Interval(1.0, 0.5, 1.5), True), (intervals.Interval(-1.0, -1.5, -0.5), True)),
        *((intervals.Interval(0.1, -0.5, 1.5), False), (intervals.Interval(0.1, 0.0, 0.2), False)),
        (intervals.Interval(1.0), False),
    ],
)
def test_an_interval_that_touches_zero_tells_nothing(interval, excludes):
    assert excludes_zero(interval) is excludes


@pytest.fixture(scope="module")
def stored():
    rounds = load_rounds(ROOT)
    studies, answers = collect_answers(rounds)
    return rounds, answers, data_sensitivity.find_controls(rounds, studies)


def test_the_control_of_stored_answers_is_of_the_same_data_and_training(stored):
    rounds, answers, controls = stored
    named = {study.name: study for study in rounds}
    names = ("ours/dialects", "tgr/tables_4_to_7", "tgr/scripts", "prc/tables_2_4_5")
    sensitive = {name: data_sensitivity.describe_round(named[name], controls) for name in names}
    assert "= +17.0 pp [+15.8 to +18.3] in ours/" in sensitive["ours/dialects"]
    assert "these data can tell routers apart (pretrain)" in sensitive["ours/dialects"]
    assert "in ours/controls: these data are not shown" in sensitive["tgr/tables_4_to_7"]
    assert "in tgr/scripts: these data can" in sensitive["tgr/scripts"]  # its own, of as many seeds
    assert sensitive["prc/tables_2_4_5"] == ""  # no hash was trained there


def test_a_method_is_judged_on_data_that_can_tell_routers_apart(stored):
    rounds, _, controls = stored
    sensitive = data_sensitivity.find_sensitive_rounds(rounds, controls)
    assert {"ours/dialects", "prc/scripts", "tgr/scripts"} <= sensitive
    assert not {"tgr/tables_4_to_7", "prc/tables_2_4_5"} & sensitive
    row = MethodRow(method="prc", against="vmoe", says="PRC")
    studies = {"prc/few": differing(0.02, seeds=3), "prc/many": differing(-0.01, seeds=9)}
    first = [methods_table([row], studies, told)[2] for told in ({"prc/few"}, set())]
    assert "+2.00 pp" in first[0] and "[prc/few](../pipelines/prc/README.md#few) |" in first[0]
    assert "−1.00 pp" in first[1] and "[prc/many](../pipelines/prc/README.md#many) ? |" in first[1]


def differing(difference, seeds):
    against = {"difference": difference, "low": difference - 0.002, "high": difference + 0.002}
    cell = {"seeds": seeds, "form": "share", "against": {"vmoe": against | {"p_holm": 0.001}}}
    return {"prc": {"pretrain": {"test_accuracy": cell}}}


def test_decided_claims_about_accuracy_are_counted_as_insensitive(stored):
    rounds, answers, controls = stored
    positive = {"verdict": "holds", "verdict_holm": "holds"}
    decided = [one._replace(entry=one.entry | positive) for one in answers if one.entry]
    pooled = [PooledAnswer(answer) for answer in decided]
    marked = data_sensitivity.mark_insensitive(pooled, rounds, controls)
    said = [each.answer for each in marked]
    counted = {(one.study, one.claim.metric): one.entry.get("insensitive") for one in said}
    assert "ours/controls" in counted["tgr/tables_4_to_7", "test_accuracy"]
    assert counted["prc/tables_2_4_5", "test_accuracy"] == data_sensitivity.UNKNOWN
    assert counted["ours/dialects", "test_accuracy"] is None
    assert counted["prc/tables_2_4_5", "match_top1_layer_1"] is None  # not about accuracy
    told = [each for each in marked if "insensitive" in each.answer.entry]
    verdicts = {data_sensitivity.counted_verdict(each.answer) == "insensitive" for each in told}
    assert verdicts == {True}
    entry = marked[0].answer.entry | {"insensitive": "why", "verdict_holm": "open"}
    undecided = marked[0].answer._replace(entry=entry)
    assert data_sensitivity.counted_verdict(undecided) == "not significant"


ANSWER = json.loads(
    """{"claim": "tgr/8_experts", "question": "ablations", "commit": "fd0e097", "seeds": [0, 1],
    "date": "2026-11-23", "better": "higher", "verdict": "open", "mean": 0.014, "low": 0.002,
    "high": 0.026, "method": 0.8, "against": 0.79, "kind": "seeds", "items": 0, "design": "0123",
    "variances": [1e-5], "freedoms": [1]}"""
)


@pytest.fixture(scope="module")
def rounds():
    return load_rounds(ROOT)


@pytest.fixture(scope="module")
def pooled(rounds):
    pooled = pooled_claims.evaluate_pooled(rounds)[1]
    return [each for each in pooled if isinstance(each.answer.claim, Claim)]


def test_tgr_with_eight_experts(pooled):
    key = ("tgr/tables_4_to_7", "table 4", "tgr")
    said = [(each, each.answer) for each in pooled if each.answer.entry]
    named = [(each, (one.study, one.source, one.claim.method)) for each, one in said]
    (found,) = [each for each, name in named if name == key]
    entry = found.answer.entry
    assert [len(run["seeds"]) for run in entry["runs"]] == [5, 12]
    assert entry["difference"]["seeds"] == 17 and entry["looks"] == 2
    assert entry["difference"]["mean"] == pytest.approx((5 * 0.014 + 12 * 0.0132859) / 17, abs=1e-6)
    assert entry["verdict_holm"] == "holds"
    assert [before.verdict_holm for before in found.earlier] == ["open"]
    assert found.designs is not None and len(found.designs.estimates) == 7
    assert found.designs.effects.interval == pytest.approx((-0.01033, -0.03149, 0.01084), abs=1e-4)
    text = pooled_claims.describe_history(found)
    assert "ablations +1.4 pp (5 seeds), tgr/tables_4_to_7 +1.3 pp (12 seeds)" in text
    assert "holds in 1 of 7 designs" in text and "(not with Holm)" in text
    (aged,) = [each for each in pooled if each.answer.claim.metric == "mae_pooled"]
    assert "9 seeds > 0, 0 < 0, sign test p = 0.0039" in pooled_claims.describe_history(aged)


def test_claims_with_one_answer_are_unchanged_and_other_p_follow_from_the_runs(rounds, pooled):
    _, alone = collect_corrected_answers(rounds)
    before = {(each.study, each.claim): each.entry for each in alone}
    numbers = Counter()
    for each in pooled:
        answer = each.answer
        entry = {key: answer.entry.get(key) for key in answer.entry if "holm" not in key}
        if "runs" not in entry:
            former = before[answer.study, answer.claim]
            assert entry == {key: former[key] for key in former if "holm" not in key}
            numbers["alone"] += 1
            continue
        runs = []
        for run in entry["runs"]:
            sources = tuple(map(SourceVariance, run["variances"], run["freedoms"]))
            kind = OVER_SEEDS if len(sources) == 1 else OVER_ITEMS_AND_SEEDS
            runs.append(Difference(run["mean"], sources, kind, len(run["seeds"]), 0))
        assert sum(run.seeds for run in runs) == entry["difference"]["seeds"]
        if answer.claim.margin is None:
            p = designs.combined_p(runs, 0.0, entry["difference"]["mean"])
            assert entry["p_combined"] == pytest.approx(p)
        assert entry["p"] == designs.correct_for_looks(entry["p_combined"], entry["looks"])
        numbers["pooled"] += 1
    assert numbers["alone"] > 10 and numbers["pooled"] > 60


def run_of(design: str, seeds: tuple[int, ...], value: float) -> Run:
    sources = (SourceVariance(1e-4 / len(seeds), len(seeds) - 1),)
    return Run(
        "one", design, seeds, Difference(value, sources, OVER_SEEDS, len(seeds), 0), (1, 0), None
    )


def test_of_runs_with_common_seeds_the_last_counts_and_each_design_is_apart():
    runs = [run_of("a", (0, 1), 1), run_of("b", (0, 1), 2), run_of("a", (1, 2, 3), 3)]
    runs.append(run_of("a", (4, 5), 4))
    by_design = pooled_claims.pool_by_design(runs)
    values = {name: [run.difference.value for run in of] for name, of in by_design.items()}
    assert values == {"a": [3, 4], "b": [2]}


@pytest.mark.parametrize(
    ("better", "good", "expected"),
    [("higher", "", "holds"), ("lower", "", "differs"), ("no_worse", "lower", "differs")],
)
def test_a_verdict_needs_its_corrected_p(better, good, expected):
    asked = claim(better=better, margin=0.005 if better == "no_worse" else None)
    runs = [run_of("a", (0, 1, 2), 0.04), run_of("a", (3, 4, 5, 6), 0.05)]
    entry = {"form": "share", "method": {"mean": 1.0}, "against": {"mean": 0.0}}
    judged = judge_runs(entry, asked, good, runs, 2)
    assert judged["verdict"] == expected and judged["method"]["mean"] == 1.0
    assert judged["p"] == pytest.approx(4 * judged["p_combined"])
    assert judge_runs(entry, asked, good, runs, 9)["verdict"] == "open"
    assert judge_runs(entry, asked, good, runs[:1], 1) == entry


def test_a_design_is_its_settings_without_seeds_and_sizes():
    study = json.loads(
        """{"run": {"seeds": [0]}, "model": {"width": 8}, "pretrain": {"epochs": 2},
        "data": {"pretrain": {"kind": "digits", "test_limit": 5}}, "teacher": {"kind": "dense"},
        "methods": {"prc": {"guided_finetuning": true}, "vmoe": {"k": 2}, "tgr": {"k": 1}},
        "routing": {"images": 100, "views": 1}, "finetune": {"epochs": 1}}"""
    )
    digest = design_digest(study, claim(), "routing")
    same = json.loads(
        """{"run": {"seeds": [1]}, "data": {"pretrain": {"kind": "digits", "root": "x"}},
        "methods": {"prc": {"guided_finetuning": false}, "vmoe": {"k": 2}}, "teacher": null,
        "finetune": null, "routing": {"images": 200, "views": 1}}"""
    )
    assert design_digest(study | same, claim(), "routing") == digest
    for section in ("model", "pretrain", "methods", "data", "routing"):
        assert design_digest(study | {section: None}, claim(), "routing") != digest, section
    taught = study | {"methods": {"prc": {"distillation": 0.5}}}
    assert design_digest(taught, claim()) != design_digest(taught | {"teacher": None}, claim())
    later = claim(phase="finetune")
    assert design_digest(study, later) != design_digest(study | {"finetune": {}}, later)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"claim": "tgr/8_expert"}, "answers.0..claim: found 'tgr/8_expert', did you mean"),
        ({"seeds": [0]}, "found a list of 1; allowed: tuple should have at least 2 items"),
        ({"verdict": "maybe"}, "answers.0..verdict: found"),
        ({"freedoms": None}, "answers.0..variances: found 1 variances and 0 freedoms; allowed: 1"),
        ({"mode": 1}, "answers.0..mode"),
    ],
)
def test_a_damaged_file_of_earlier_answers_is_one_line(tmp_path, change, message):
    path = tmp_path / items_and_dates.REPLACED_JSON
    named = papers.load_named_claims(ROOT)
    assert load_earlier_answers(tmp_path, named) == ()
    write_atomic(path, json.dumps({"answers": [ANSWER]}))
    (answer,) = load_earlier_answers(tmp_path, named)
    assert answer.difference is not None and answer.difference.half_width() is not None
    write_atomic(path, json.dumps({"answers": [ANSWER | change]}))
    with pytest.raises(UserError, match=message) as caught:
        load_earlier_answers(tmp_path, named)
    assert "\n" not in str(caught.value)
    write_atomic(path, json.dumps({"answers": [ANSWER, ANSWER]}))
    with pytest.raises(UserError, match="found tgr/8_experts of ablations again; allowed: each"):
        load_earlier_answers(tmp_path, named)


def test_variances_follow_from_the_interval_and_the_detectable_difference():
    sources = (SourceVariance(4e-4, 4), SourceVariance(1e-4, 199))
    known = Difference(0.02, sources, "items × seeds", 5, 200)
    interval = known.interval()
    stored = {"mean": 0.02, "low": interval.low, "high": interval.high, "items": 200}
    entry = {"difference": stored | {"interval": "items × seeds"}}
    for more in ({"smallest": known.detectable_difference}, {"p": known.p}):
        derived = derive_variances(entry | more, 5, None)
        assert derived is not None and derived[0] == pytest.approx([4e-4, 1e-4], rel=1e-6)
    assert derive_variances(entry, 5, None) is None, "one number does not give two"
    by_seeds = {"difference": stored | {"interval": "t"}}
    assert derive_variances(by_seeds, 5, None) == (
        [pytest.approx((known.half_width() / 2.776445) ** 2)],
        [4],
    )

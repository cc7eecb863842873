"""The papers' claims over all runs of their design: pipelines/results/earlier.json."""

import json
from collections import Counter

import pytest

from moecore.core.files import UserError, write_whole
from moecore.report.claims import result_evidence
from moecore.report.claims.answers import evaluate_results
from moecore.statistics.comparisons import BOTH, SEEDS, Difference, VarianceSource
from moecore.statistics.pooling import combined_p, correct_for_looks
from moecore.study import papers
from moecore.study.questions import load_rounds
from moecore.study.sections import Claim, design_digest
from tests.project import ROOT
from tests.report.test_claims import claim
from tools.earlier_answers import derive_variances
from tools.pooled_claims import (
    Run,
    describe_history,
    evaluate_pooled,
    judge_runs,
    load_earlier_answers,
    pool_by_design,
)

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
    return [each for each in evaluate_pooled(rounds)[1] if isinstance(each.answer.claim, Claim)]


def test_tgr_with_eight_experts(pooled):
    key = ("TGR", "table 4", "tgr")
    (found,) = [
        each
        for each in pooled
        if (each.answer.claim.paper, each.answer.source, each.answer.claim.method) == key
        and each.answer.entry
    ]
    entry = found.answer.entry
    assert [len(run["seeds"]) for run in entry["runs"]] == [5, 12]
    assert entry["difference"]["seeds"] == 17 and entry["looks"] == 2
    assert entry["difference"]["mean"] == pytest.approx((5 * 0.014 + 12 * 0.0132859) / 17, abs=1e-6)
    assert entry["verdict_holm"] == "holds"
    assert [before.verdict_holm for before in found.earlier] == ["open"]
    assert found.designs is not None and len(found.designs.estimates) == 5
    assert found.designs.effects.interval == pytest.approx((-0.0122, -0.0467, 0.0224), abs=1e-4)
    text = describe_history(found)
    assert "ablations +1.4 pp (5 seeds), tgr/tables_4_to_7 +1.3 pp (12 seeds)" in text
    assert "holds in 1 of 5 designs" in text and "(not with Holm)" in text
    (aged,) = [each for each in pooled if each.answer.claim.metric == "mae_pooled"]
    assert "9 seeds > 0, 0 < 0, sign test p = 0.0039" in describe_history(aged)


def test_claims_with_one_answer_are_unchanged_and_other_p_follow_from_the_runs(rounds, pooled):
    _, alone = evaluate_results(rounds)
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
            sources = tuple(map(VarianceSource, run["variances"], run["freedoms"]))
            kind = SEEDS if len(sources) == 1 else BOTH
            runs.append(Difference(run["mean"], sources, kind, len(run["seeds"]), 0))
        assert sum(run.seeds for run in runs) == entry["difference"]["seeds"]
        if answer.claim.margin is None:
            p = combined_p(runs, 0.0, entry["difference"]["mean"])
            assert entry["p_combined"] == pytest.approx(p)
        assert entry["p"] == correct_for_looks(entry["p_combined"], entry["looks"])
        numbers["pooled"] += 1
    assert numbers["alone"] > 10 and numbers["pooled"] > 60


def run_of(design: str, seeds: tuple[int, ...], value: float) -> Run:
    sources = (VarianceSource(1e-4 / len(seeds), len(seeds) - 1),)
    return Run("one", design, seeds, Difference(value, sources, SEEDS, len(seeds), 0), (1, 0), None)


def test_of_runs_with_common_seeds_the_last_counts_and_each_design_is_apart():
    runs = [run_of("a", (0, 1), 1), run_of("b", (0, 1), 2), run_of("a", (1, 2, 3), 3)]
    runs.append(run_of("a", (4, 5), 4))
    by_design = pool_by_design(runs)
    values = {name: [run.difference.value for run in of] for name, of in by_design.items()}
    assert values == {"a": [3, 4], "b": [2]}


@pytest.mark.parametrize(
    ("better", "good", "expected"),
    [("higher", "", "holds"), ("lower", "", "differs"), ("no_worse", "lower", "differs")],
)
def test_a_verdict_needs_its_corrected_p(better, good, expected):
    margin = 0.005 if better == "no_worse" else None
    asked = claim(better=better, margin=margin)
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
    path = tmp_path / result_evidence.EARLIER
    named = papers.load_named_claims(ROOT)
    assert load_earlier_answers(tmp_path, named) == ()
    write_whole(path, json.dumps({"answers": [ANSWER]}))
    (answer,) = load_earlier_answers(tmp_path, named)
    assert answer.difference is not None and answer.difference.half() is not None
    write_whole(path, json.dumps({"answers": [ANSWER | change]}))
    with pytest.raises(UserError, match=message) as caught:
        load_earlier_answers(tmp_path, named)
    assert "\n" not in str(caught.value)
    write_whole(path, json.dumps({"answers": [ANSWER, ANSWER]}))
    with pytest.raises(UserError, match="found tgr/8_experts of ablations again; allowed: each"):
        load_earlier_answers(tmp_path, named)


def test_variances_follow_from_the_interval_and_the_detectable_difference():
    sources = (VarianceSource(4e-4, 4), VarianceSource(1e-4, 199))
    known = Difference(0.02, sources, "items × seeds", 5, 200)
    interval = known.interval()
    stored = {"mean": 0.02, "low": interval.low, "high": interval.high, "items": 200}
    entry = {"difference": stored | {"interval": "items × seeds"}}
    for more in ({"smallest": known.smallest}, {"p": known.p}):
        derived = derive_variances(entry | more, 5, None)
        assert derived is not None and derived[0] == pytest.approx([4e-4, 1e-4], rel=1e-6)
    assert derive_variances(entry, 5, None) is None, "one number does not give two"
    by_seeds = {"difference": stored | {"interval": "t"}}
    assert derive_variances(by_seeds, 5, None) == (
        [pytest.approx((known.half() / 2.776445) ** 2)],
        [4],
    )

"""Claims: paired by seed, by Student's interval, never silent about gaps; the cross-table."""

import json
import math
import shutil

import numpy as np
import pytest
from pydantic import ValidationError

from moecore.core.files import FileAccessError, UserError, write_atomic, write_json
from moecore.core.source_layout import ROOT
from moecore.measure import base, routing
from moecore.measure.values import Value
from moecore.report.claims import evaluation
from moecore.report.claims.answers import reevaluate_claim
from moecore.report.claims.claims_table import ANSWERS, build_claim_row, claims_markdown
from moecore.report.claims.evaluation import claim_to_json, claims_for_compare_json, evaluate_claims
from moecore.report.page.report_page import render_report
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.report.tables.metrics_by_method import compare_methods, expected_metrics
from moecore.report.tables.terminal_summary import claim_lines, headline_rows
from moecore.statistics import comparisons
from moecore.study import papers, questions
from moecore.study import run_and_claims as module
from moecore.study.study import read_study
from moecore.training.outcome import Outcome
from tests.report import generated
from tests.report.test_report import assert_self_contained, results
from tools import study_pages as pages
from tools.reader_answers import ANSWERS_PAGE

pytestmark = pytest.mark.usefixtures("undrawn")

ROUTED = generated.routed_by(generated.records_of(0), 0, 0)


def model(method: int, match: float | None, accuracy: float = 0.5) -> ModelResults:
    score = base.Estimate(value=accuracy, low=accuracy - 0.1, high=accuracy + 0.1)
    outcome = generated.trained(method, 0, False, "pretrain")
    outcome = outcome.model_copy(update={"test_score": score})
    if match is None:
        return generated.model_with_results(outcome)
    return matching(outcome, Value(metric="match_top1", value=match))


def matching(outcome: Outcome, match: Value) -> ModelResults:
    """A model whose views match as often as this."""
    values = (*(one for one in ROUTED.values if one.metric != "match_top1"), match)
    routed = ROUTED.model_copy(update={"values": values})
    return generated.changed(ModelResults({routing.Routing: routed}), outcome)


def one_phase(models) -> StudyResults:
    phase = PhaseResults("pretrain", generated.card("pretrain"), generated.TASK, models)
    return StudyResults({"pretrain": phase})


def study(**methods: list) -> StudyResults:
    models = {
        name: {seed: model(number, value) for seed, value in enumerate(values)}
        for number, (name, values) in enumerate(methods.items())
    }
    return one_phase(models)


def flat_claims(evaluated) -> dict:
    return claims_for_compare_json(evaluated).get("claims", {})


def claim(**changes) -> module.Claim:
    text = {"source": "table 4", "says": "Views agree.", "quote": "Views agree more."}
    sides = {"method": "prc", "against": "vmoe", "metric": "match_top1", "better": "higher"}
    reference = {"reference_effect": 10.0} if "margin" in changes else {}
    return module.Claim(**{"paper": "PRC"} | text | sides | reference | changes)


def test_the_difference_is_paired_by_seed():
    # differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t(2 degrees, 97.5 %) = 4.302653, half
    # width 4.302653 · 0.1 / √3 = 0.248414
    found = evaluate_claims([claim()], study(vmoe=[0.1, 0.5, 0.2], prc=[0.2, 0.7, 0.5]))[0]
    limits = (0.2 - 0.248414, 0.2 + 0.248414)
    assert found.difference.interval() == pytest.approx((0.2, *limits), abs=1e-6)
    assert found.verdict == "open"
    # the same gaps around very different seeds: unpaired intervals overlap, the paired one
    # excludes 0
    found = evaluate_claims([claim()], study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89]))[0]
    assert found.verdict == "holds"
    assert found.ours.interval.low < found.theirs.interval.value < found.ours.interval.value
    limits = (0.1 - 0.0248414, 0.1 + 0.0248414)
    assert found.difference.interval() == pytest.approx((0.1, *limits), abs=1e-6)


def found(value: float, half: float | None) -> comparisons.Difference:
    """A difference over very many items, whose 95 % interval has this half width."""
    sources = () if half is None else (comparisons.SourceVariance((half / 1.959964) ** 2, 10**7),)
    return comparisons.Difference(value, sources, comparisons.OVER_ITEMS, 1, 10**7)


@pytest.mark.parametrize(
    ("better", "value", "half", "expected"),
    [
        ("higher", 0.15, 0.05, "holds"),
        ("higher", -0.15, 0.05, "differs"),
        ("higher", 0.0, 0.1, "open"),
        ("higher", 0.05, 0.0501, "open"),
        ("higher", 0.1, None, "open"),
        ("equivalent", 0.0, 0.1, "holds"),
        ("equivalent", 0.04, 0.06, "holds"),  # 90 %: 0.04 + 0.06 · 1.645/1.96 = 0.0904
        ("equivalent", 0.04, 0.075, "open"),  # 0.04 + 0.0629 > 0.1
        ("equivalent", 0.2, 0.09, "differs"),
        ("equivalent", 0.2, 0.11, "open"),
        ("equivalent", 0.15, 0.06, "open"),
        ("equivalent", 0.0, None, "open"),
        ("no_worse", 0.3, 0.2, "holds"),
        ("no_worse", -0.04, 0.07, "holds"),  # one-sided: −0.04 − 0.07 · 1.645/1.96 > −0.1
        ("no_worse", -0.04, 0.075, "open"),  # −0.1029
        ("no_worse", -0.15, 0.06, "open"),
        ("no_worse", -0.2, 0.09, "differs"),
        ("no_worse", -0.2, 0.11, "open"),
        ("no_worse", 0.2, None, "open"),
    ],
)
def test_verdicts(better, value, half, expected):
    """With a margin of 0.1 for equivalent and no_worse; mirrored where lower is better."""
    margin = {} if better == "higher" else {"margin": 0.1}
    for sign, good in ((1, "higher"), (-1, "lower")):
        asked = claim(better=good if better == "higher" else better, **margin)
        difference = found(sign * value, half)
        p = evaluation.verdict_p_value(difference, asked, good)
        assert evaluation.verdict_on_difference(difference, asked, good) == expected
        assert (p is None) == (half is None) and (p is None or (p < 0.05) == (expected != "open"))


def test_the_column_knows_what_is_worse():
    # differences 0.01, 0.02, 0.03: t(2), one-sided 2.919986: limit 0.02 − 2.92 · 0.01/√3 = 0.003
    shown = study(vmoe=[0.1, 0.5, 0.2], prc=[0.11, 0.52, 0.23])
    asked = {"better": "no_worse", "margin": 0.001}
    cases = [claim(**asked), claim(**(asked | {"method": "vmoe", "against": "prc"})), claim()]
    verdicts = [one.verdict for one in evaluate_claims(cases, shown)]
    assert verdicts == ["holds", "open", "open"]  # 95 %: 0.02 ± 4.302653 · 0.01/√3 = ± 0.0248
    assert "no worse within 0" in claims_markdown(evaluate_claims(cases, shown))


@pytest.mark.parametrize(
    ("effect", "better", "said"),
    [
        (0.5, "higher", True),  # 0.2 ± 0.248, open
        (0.4, "higher", False),
        (-0.04, "lower", False),
        (-0.06, "lower", True),
        (None, "higher", False),
    ],
)
def test_an_interval_excludes_what_the_paper_prints(effect, better, said):
    shown = study(vmoe=[0.1, 0.5, 0.2], prc=[0.2, 0.7, 0.5])
    (one,) = evaluate_claims([claim(effect=effect, better=better)], shown)
    row = build_claim_row(claim_to_json(one))
    assert one.verdict == "open" and bool(row.excludes) == said
    printed = f"{effect:+.2%}".replace("-", "−").replace("%", " pp") if effect else ""
    assert row.effect == printed and row.excludes in claims_markdown([one])
    assert row.excludes in claim_lines(flat_claims([one]))[0]


def test_a_claim_may_hold_and_exclude_the_size_that_the_paper_prints():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89])  # 0.1 ± 0.025
    asked = [claim(effect=0.08), claim(effect=0.5), claim(better="lower", effect=-0.5)]
    near, far, other = map(claim_to_json, evaluate_claims(asked, shown))
    assert [entry["verdict"] for entry in (near, far, other)] == ["holds", "holds", "differs"]
    assert build_claim_row(near).excludes == ""
    assert build_claim_row(far).excludes == "excludes the paper's +50.00 pp"
    assert build_claim_row(other).excludes == "excludes the paper's −50.00 pp"


def test_holm_counts_the_claims_of_one_paper():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.63, 0.87])
    one = evaluate_claims([claim()], shown)[0]
    assert 0.01 < one.p == one.p_holm < 0.05 and one.verdict_holm == one.verdict == "holds"
    others = [claim(), claim(better="lower"), claim(paper="TGR"), question()]
    found = evaluate_claims([*others, claim(metric="test_accuracy")], shown)
    # two of PRC: accuracies are all alike and no test is made
    assert [round(one.p_holm / one.p) for one in found[:3]] == [2, 2, 1]
    assert [one.verdict_holm for one in found] == ["open", "open", "holds", "", ""]
    assert found[3].p_holm is None and found[3].p == found[0].p
    text = claims_markdown(found)
    assert "| ✓ holds | ? open |" in text and "| ✓ holds | ✓ holds |" in text


def with_items(values: list[np.ndarray]) -> dict[int, ModelResults]:
    """A model a seed whose match ratio is the mean of these items."""
    outcome = generated.trained(0, 0, False, "pretrain")
    models = {}
    for seed, one in enumerate(values):
        items = comparisons.encode_item_values(one)
        models[seed] = matching(outcome, Value(metric="match_top1", value=one.mean(), items=items))
    return models


def of_items(ours: list[np.ndarray], theirs: list[np.ndarray]) -> StudyResults:
    return one_phase({"prc": with_items(ours), "vmoe": with_items(theirs)})


def test_items_and_seeds_both_widen_the_interval():
    generator = np.random.default_rng(0)
    shared = generator.standard_normal(60)
    theirs = [0.3 * generator.standard_normal(60) for _ in range(3)]
    ours = [one + 0.5 * shared + 0.2 for one in theirs]  # the same gap in every seed
    found = evaluate_claims([claim()], of_items(ours, theirs))[0]
    expected = comparisons.crossed_difference(np.stack(ours) - np.stack(theirs))
    assert (
        found.difference.kind == comparisons.OVER_ITEMS_AND_SEEDS and found.difference.items == 60
    )
    assert found.difference.interval() == pytest.approx(expected.interval(), abs=1e-3)
    # The seeds alone would leave no doubt.
    apart = np.mean(ours, axis=1) - np.mean(theirs, axis=1)
    assert np.ptp(apart) < 1e-9 and found.difference.half_width() > 0.1
    alone = evaluate_claims([claim()], of_items(ours[:1], theirs[:1]))[0]
    assert alone.difference.kind == comparisons.OVER_ITEMS and alone.difference.interval().limits
    entry = next(iter(flat_claims([alone]).values()))
    assert entry["difference"]["interval"] == "items" and entry["difference"]["items"] == 60
    assert ", items | " in claims_markdown([alone])


def test_items_that_differ_are_refused():
    generator = np.random.default_rng(0)
    long, short = generator.random(20), generator.random(19)
    with pytest.raises(UserError, match=r"claims\[0\].metric: found match_top1 is of 19 and of 20"):
        evaluate_claims([claim()], of_items([long], [short]))
    shown = of_items([long], [long])
    shown.phases["pretrain"].models["vmoe"][0] = model(1, 0.5)
    with pytest.raises(UserError, match="only some results keep the items of match_top1"):
        evaluate_claims([claim()], shown)


def test_an_open_verdict_says_what_could_have_been_seen():
    shown = study(vmoe=[0.1, 0.5, 0.2], prc=[0.2, 0.7, 0.5])
    found = evaluate_claims([claim()], shown)[0]
    # deviation 0.1, standard error 0.1/√3; t(2): 4.302653 and 1.060660
    assert found.difference.detectable_difference == pytest.approx(
        (4.302653 + 1.060660) * 0.1 / math.sqrt(3)
    )
    assert "detectable: 31" in claims_markdown([found])
    assert (
        next(iter(flat_claims([found]).values()))["smallest"]
        == found.difference.detectable_difference
    )
    assert "detectable: 31" in claim_lines(flat_claims([found]))[0]
    sure = evaluate_claims([claim()], study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89]))[0]
    assert sure.verdict == "holds" and "detectable" not in claims_markdown([sure]).splitlines()[-1]


def question(**changes) -> module.Question:
    given = claim().model_dump(exclude={"source", "says", "paper", "quote", "effect"})
    return module.Question(**given | {"asks": "Do views agree?"} | changes)


def test_questions_are_answered_in_a_table_of_their_own():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.61, 0.89])
    alike = question(better="equivalent", margin=0.1)
    found = evaluate_claims([question(), claim(), question(better="lower"), alike], shown)
    text = claims_markdown(found)
    claims, asked = text.split("## What no paper claims")
    assert "differs |" not in text.split("\n\n", 2)[2] and "✓ holds" in claims
    assert "| Do views agree? | yes |" in asked and "| Do views agree? | no |" in asked
    assert "| open; detectable: " in asked and "✓" not in asked
    flat = claims_for_compare_json(found)
    assert len(flat["claims"]) == 1 and len(flat["questions"]) == 3
    assert claim_lines(flat["questions"], ANSWERS)[0].startswith("yes  ")
    whole = render_report(shown, found)
    assert "What no paper claims" in whole and "Do views agree?" in whole
    assert "Of 3 questions that no paper answers: 1 yes, 1 no, 1 open." in whole


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"better": "equivalent"}, "found margin None"),
        ({"margin": 0.1}, "found margin 0.1, better higher"),
        ({"better": "equivalent", "margin": 0.0}, "greater than 0"),
        ({"better": "no_worse"}, "found margin None"),
        ({"effect": -0.1}, "found effect -0.1, better higher"),
        ({"effect": 0.1, "better": "lower"}, "found effect 0.1, better lower"),
        ({"source": ""}, "at least 1 character"),
        ({"quote": "Views agree more"}, "stops inside a sentence: … Views agree more; allowed"),
        ({"quote": "agree more than theirs."}, "stops inside a sentence"),
        ({"quote": "… agree more."}, "stops inside a sentence"),
        ({"better": "no_worse", "margin": 0.1, "reference_effect": None}, "found a margin alone"),
        ({"better": "no_worse", "margin": 0.1, "reference_effect": 0.29}, "margin 0.1, reference_"),
        ({"against_metric": "match_top1"}, "the metric itself"),
    ],
)
def test_what_is_no_claim(given, expected):
    with pytest.raises(ValidationError, match=expected):
        claim(**given)


def test_a_quote_is_whole_sentences_or_a_cell_and_a_margin_at_most_a_third_of_an_effect():
    claim(quote="Views agree more. And so on (Eq. 6)?")
    claim(quote="k = 1 is less, and k = 2 best.")
    claim(quote='table 4, E = 8: "VMoE 77.39%"')
    claim(better="equivalent", margin=0.1, reference_effect=0.3)


def test_without_an_interval_a_claim_is_open():
    (one,) = evaluate_claims([claim()], study(vmoe=[0.125, 0.25], prc=[0.25, 0.375]))
    assert one.verdict == "open" and one.p is None and one.p_holm is None
    assert "no interval: identical for all seeds" in claims_markdown([one])
    (one,) = evaluate_claims([claim()], study(vmoe=[0.1], prc=[0.9]))
    assert one.verdict == "open" and one.difference.interval() == (pytest.approx(0.8), None, None)
    assert "one seed, no interval" in claims_markdown([one])
    assert "(no interval)" in claim_lines(flat_claims([one]))[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metric": "match_top9"}, "metric: found 'match_top9'; allowed: test_acc.*, match_top1"),
        ({"metric": "tail_mass"}, "metric: found 'tail_mass'; allowed: "),  # no model has it
        ({"method": "prcc"}, "method: found 'prcc'; allowed: dense, vmoe, prc$"),
        ({"against": "vmeo"}, "against: found 'vmeo'; allowed: dense, vmoe$"),
        ({"against": "prc"}, "against: found 'prc'; allowed: dense, vmoe$"),
        ({"against": "dense"}, "against: dense has no match_top1; allowed: vmoe, prc$"),
        ({"phase": "finetune"}, "phase: found 'finetune'; allowed: pretrain$"),
    ],
)
def test_what_is_not_there_is_named(changes, expected):
    shown = study(dense=[None, None], vmoe=[0.1, 0.2], prc=[0.3, 0.4])
    with pytest.raises(UserError, match=rf"claims\[1\].{expected}"):
        evaluate_claims([claim(), claim(**changes)], shown)


def test_a_method_without_the_metric_is_told():
    shown = study(dense=[None, None], vmoe=[0.1, 0.2], prc=[0.3, 0.4])
    assert evaluation.describe_missing_metric(claim(), shown) == ""
    told = "dense has no match_top1"
    assert evaluation.describe_missing_metric(claim(against="dense"), shown) == told
    wanted = "prc has no tail_mass"
    assert evaluation.describe_missing_metric(claim(metric="tail_mass"), shown) == wanted


def test_an_interval_of_one_model_counts_by_its_value():
    shown = study(vmoe=[0.1, 0.2], prc=[0.3, 0.4])
    shown.phases["pretrain"].models["prc"][1] = model(1, 0.4, accuracy=0.54)
    # accuracies 0.50, 0.50 and 0.50, 0.54: differences 0, 0.04; t(1 degree) = 12.7062, deviation
    # 0.04/√2, half width 12.7062 · 0.02
    found = evaluate_claims([claim(metric="test_accuracy")], shown)[0]
    limits = (0.02 - 12.7062 * 0.02, 0.02 + 12.7062 * 0.02)
    assert found.difference.interval() == pytest.approx((0.02, *limits), abs=1e-5)


def test_where_claims_are_shown(tmp_path):
    shown = results(tmp_path, seeds=(0, 1, 2))
    says = "Views <agree> | always"
    lower = claim(method="tgr", better="lower", phase="finetune")
    evaluated = evaluate_claims([claim(says=says, method="tgr"), lower], shown)
    text, lines = render_report(shown, evaluated), claims_markdown(evaluated).splitlines()
    assert_self_contained(text)
    assert "Views &lt;agree&gt; | always" in text and 'href="#claims"' in text
    assert text.index('id="claims"') < text.index('id="pretrain"')
    assert lines[-2].startswith(
        "| PRC; table 4: Views <agree> \\| always “Views agree more.” | ✓ holds | ? open | "
        "+1.5 pp; +0.3 to +2.7, seeds | 54.5 %; "
    )
    assert lines[-2].endswith("; vmoe | Match, first expert; higher is claimed, pretrain |")
    assert "✗ differs here" in lines[-1]
    assert len({line.replace("\\|", "").count("|") for line in lines[4:]}) == 1
    stored = flat_claims(evaluated)
    first = next(iter(stored.values()))
    assert next(iter(stored)) == "0: PRC, pretrain: match_top1 of tgr higher than of vmoe"
    assert first["verdict"] == "holds"
    # generated for seed s: tgr, method 2, has 0.54 + 0.005 s; vmoe, method 1, has 0.52 + 0.01 s
    assert first["method"]["mean"] == pytest.approx(0.545)
    assert first["against"]["mean"] == pytest.approx(0.53)
    assert first["difference"]["mean"] == pytest.approx(0.015) and first["difference"]["seeds"] == 3
    half = 4.302653 * 0.005 / math.sqrt(3)  # differences 0.02, 0.015, 0.01
    assert first["difference"]["low"] == pytest.approx(0.015 - half, abs=1e-6)
    assert claim_lines(stored)[0].startswith(
        "holds         PRC, pretrain: match_top1 of tgr higher than of vmoe: "
        "+1.5 pp [+0.3 to +2.7] (over seeds"
    )
    assert 'id="claims"' not in render_report(shown) and "no claims" in claims_markdown([])
    assert flat_claims([]) == {} and claim_lines({}) == []
    rows = headline_rows(compare_methods(shown) | {"claims": stored})
    assert [row["method"] for row in rows[:3]] == ["dense", "vmoe", "tgr"]


def test_the_pages_of_all_claims_and_questions_are_fresh():
    written = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    assert written == pages.render_claims_page(ROOT), "run `make pages`"
    assert "## Claims of other sources" not in written, "each claim is in a row of a paper"
    for path, text in pages.render_study_pages(ROOT).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make pages`"
    first_screen = (ROOT / pages.STUDIES_PAGE).read_text(encoding="utf-8")[:3000]
    for method in ("PRC", "ERMoE", "TGR", "MoGE"):
        assert f"Does {method} beat V-MoE?" in first_screen


def small_project(root, compared: dict | None, **settings) -> str:
    """The page over one study of two claims and a question, with these numbers and settings."""
    alike = claim(source="table 3", better="equivalent", margin=0.1)
    odd = claim(paper="Someone", source="a letter", metric="imed")
    params = {"run": {"methods": ["prc", "vmoe"], "seeds": [0, 1], "phases": ["pretrain"]}}
    params |= {"claims": [asked.model_dump(exclude_none=True) for asked in (claim(), alike, odd)]}
    params |= {"questions": [question().model_dump(exclude_none=True)], **settings}
    write_atomic(root / "params.yaml", "")
    stages = ["teacher_router", "pretrain", "compare"]
    write_atomic(root / "pipelines/own/one.yaml", json.dumps({"stages": stages} | params))
    if compared is not None:
        write_json(root / "pipelines/results/own/one.json", compared)
    return pages.render_claims_page(root)


def as_json(content: dict) -> dict:
    return json.loads(json.dumps(content))


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start} "))


def test_a_study_that_was_not_run(tmp_path):
    text = small_project(tmp_path, None)
    assert "| not run yet |  | `moecore study run own/one` |" in row_of(text, "table 4")
    assert "of a paper: 3 not run yet." in text
    assert "## Claims of other sources" in text and "| Someone | a letter |" in text
    assert "| Do views agree? |  | not run yet |" in text


def test_a_study_that_was_run(tmp_path):
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82])
    alike = claim(source="table 3", better="equivalent", margin=0.1)
    found = evaluate_claims([claim(), alike, question(better="lower")], shown)
    compared = as_json(compare_methods(shown) | claims_for_compare_json(found))
    text = small_project(tmp_path, compared)
    assert "| equivalent |" in row_of(text, "table 3")
    four = row_of(text, "table 4")
    assert "`match_top1` prc 48" in four
    assert "over seeds (3 seeds) | not significant (detectable: " in four
    assert "of a paper: 1 equivalent, 1 not significant, 1 not run yet." in text
    assert "not run yet with this claim" in text, "the one of a letter was not asked then"
    assert question(better="lower").asks not in text.split("## What no paper claims")[0]
    wider = claim(source="table 3", better="equivalent", margin=0.2)
    now = [asked.model_dump(exclude_none=True) for asked in (claim(), wider)]
    changed = small_project(tmp_path / "changed", compared, claims=now)
    assert "| equivalent; asked after the run |" in row_of(changed, "table 3")
    late = small_project(tmp_path / "late", compared | {"asked": {"late": True}})
    assert "asked after" not in four and "at 80 % power); asked after" in row_of(late, "table 4")
    for entry in (*compared["claims"].values(), *compared["questions"].values()):
        del entry["asked"]  # of an older version
    older = small_project(tmp_path / "older", compared)
    assert "not run yet with this claim" in row_of(older, "table 4")


def test_a_withdrawn_claim_stays_in_its_table():
    withdrawn = {"says": "It was faster.", "found": "differed: −2", "why": "another data set"}
    row = papers.PaperTable(number="table 1", shows="times", withdrawn=[withdrawn])
    _, (cells,) = pages.paper_item_state_and_rows(row, [], {}, {})
    assert cells[:2] == ["table 1", "times"]
    assert cells[3:] == ["It was faster.", "differed: −2", "withdrawn: another data set", "", ""]


def test_a_result_without_variances_decides_nothing(tmp_path):
    found = evaluate_claims([claim()], study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82]))
    sections = as_json(claims_for_compare_json(found))
    assert "not run yet" not in row_of(small_project(tmp_path, sections), "table 4")
    (entry,) = sections["claims"].values()
    del entry["difference"]["variances"]
    assert "not run yet with this claim" in row_of(small_project(tmp_path, sections), "table 4")


def test_readmes_have_the_answers_between_markers_and_the_numbers_that_a_text_names(tmp_path):
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82])
    found = evaluate_claims([claim(effect=0.1), question(better="lower")], shown)
    compared = as_json(compare_methods(shown) | claims_for_compare_json(found))
    texts = {"answer": "by {match_top1 vmoe - prc:.2f} points, from {match_top1 vmoe}"}
    claims = [claim(effect=0.1).model_dump(mode="json")]
    small_project(tmp_path, compared, question="do they?", claims=claims, **texts)
    readme = "# own: ours\n<!-- answers: own/one -->\nstale\n<!-- end -->\nkept\n"
    write_atomic(tmp_path / "pipelines/own/README.md", readme)
    written = pages.write_study_pages(tmp_path)
    assert written == [pages.STUDIES_PAGE, papers.PIPELINES / "own/README.md"]
    index, own = ((tmp_path / path).read_text("utf-8") for path in written)
    # means 0.46667 and 0.48
    assert "do they? | by 1.33 points, from 46.7 | `moecore study run own/one` |" in index
    assert "stale" not in own and own.endswith("<!-- end -->\nkept\n")
    assert "| asked | answer | difference [95 %] over seeds (3 seeds) | measured |" in own
    row = row_of(own, "PRC, table 4: Views agree.")
    assert "| not significant (detectable: " in row
    assert "; the paper: +10.00 pp | `match_top1`" in row
    assert row_of(own, "Do views agree?").endswith("| `match_top1` prc 48 %, vmoe 47 % |")
    write_atomic(tmp_path / "pipelines/own/README.md", readme.replace("own/one", "own/two"))
    with pytest.raises(UserError, match=r"README.md:2: answers: found 'own/two'.*tgr/table_3"):
        pages.write_study_pages(tmp_path)
    write_atomic(tmp_path / "pipelines/own/README.md", readme)
    small_project(tmp_path, compared, answer="{match_top1 tgr}")
    with pytest.raises(UserError, match=r"one.yaml: found {match_top1 tgr}, which no result of"):
        pages.write_study_pages(tmp_path)


def test_readers_questions_are_answered_from_the_results(tmp_path):
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.63, 0.87])
    found = evaluate_claims([claim(), question(better="lower")], shown)
    compared = json.loads(json.dumps(compare_methods(shown) | claims_for_compare_json(found)))
    small_project(tmp_path, compared, claims=[claim().model_dump(mode="json", exclude_none=True)])
    write_atomic(tmp_path / "pipelines/own/README.md", "# own: ours\n")
    cited = {"study": "own/one", "data": "numbers by hand", "metric": "match_top1"}
    cited |= {"method": "prc", "against": "vmoe"}
    first = {"question": "Does PRC agree more?", "answer": "by {match_top1 prc - vmoe:.1f} points"}
    second = {"question": "Which agrees?", "answer": "pRC"}
    content = {
        "questions": [asked | {"evidence": [cited]} for asked in (first, second)],
        "methods": [{"method": "prc", "says": "PRC"}, {"method": "tgr", "says": "TGR"}],
    }
    file = tmp_path / "pipelines/answers.yaml"
    write_atomic(file, json.dumps(content))
    written = pages.render_study_pages(tmp_path)
    index, text = written[pages.STUDIES_PAGE], written[ANSWERS_PAGE]
    # (0.1 + 0.13 + 0.07) / 3; the interval of one claim excludes 0
    assert "| Does PRC agree more? | **Yes**: by 10.0 points. | [own/one](own/README.md#one) |" in (
        index
    )
    assert "## Which agrees?\n\nPRC.\n\n- numbers by hand: `match_top1` of prc − vmoe: +10" in text
    assert "(3 seeds), holds: [own/one](../pipelines/own/README.md#one)" in text
    assert "| TGR (`tgr`) | – | – | – | – | – |" in text
    content["questions"][1]["evidence"] = [cited | {"metric": "imed"}]
    write_atomic(file, json.dumps(content))
    said = r"answers.yaml:1:\d+: questions.1..evidence.0.: found imed"
    with pytest.raises(UserError, match=said):
        pages.render_study_pages(tmp_path)


def test_holm_counts_the_claims_of_a_paper_in_all_studies(tmp_path):
    # differences 0.1, 0.13, 0.07: t(2) = 0.1/(0.03/√3) = 5.77, p = 0.0287; of two claims 0.0574
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.63, 0.87])
    found = evaluate_claims([claim()], shown)
    compared = as_json(compare_methods(shown) | claims_for_compare_json(found))
    assert found[0].verdict_holm == "holds"
    alone = small_project(tmp_path, compared, claims=[claim().model_dump(mode="json")])
    assert "of a paper: 1 holds." in alone and "Views agree. (“Views agree more.”)" in alone
    for name in ("own/one.yaml", "results/own/one.json"):
        path = tmp_path / "pipelines" / name
        shutil.copy(path, path.with_stem("two"))
    both = pages.render_claims_page(tmp_path)
    assert "Of 1 claims" in both and "of a paper: 1 not significant." in both, "one fact"
    (tmp_path / "pipelines/results/own/one.json").unlink()
    assert "of a paper: 1 holds." in pages.render_claims_page(tmp_path), "where it is answered"
    assert "; p × 4 for 2 answers |" in row_of(both, "table 4")


@pytest.mark.parametrize("shift", [0.2, 0.02])  # decided and open
@pytest.mark.parametrize(
    "kind", [comparisons.OVER_ITEMS_AND_SEEDS, comparisons.OVER_ITEMS, "seeds"]
)
def test_a_stored_difference_is_the_one_that_was_taken(shift, kind):
    generator = np.random.default_rng(0)
    theirs = [generator.standard_normal(60) for _ in range(3)]
    ours = [one + shift + 0.1 * generator.standard_normal(60) for one in theirs]
    shown = (
        of_items(ours, theirs)
        if kind == comparisons.OVER_ITEMS_AND_SEEDS
        else of_items(ours[:1], theirs[:1])
    )
    if kind == "seeds":
        shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.1 + shift, 0.51 + shift, 0.79 + shift])
    for one in evaluate_claims([claim(), claim(better="equivalent", margin=0.11)], shown):
        assert one.difference.kind == kind and (one.p < 0.05) == (one.verdict != "open")
        entry = as_json(claim_to_json(one))
        assert evaluation.difference_from_json(entry) == one.difference
        no_worse = claim(better="no_worse", margin=0.3, effect=-0.5)
        judged = reevaluate_claim(entry, no_worse, "higher")
        assert (
            judged["verdict"]
            == evaluation.verdict_on_difference(one.difference, no_worse, "higher")
            == "holds"
        )
        assert judged["asked"]["effect"] == -0.5 and judged["method"] == entry["method"]


def test_answers_whose_settings_were_changed_are_marked(tmp_path):
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82])
    asked = [claim(), question()]
    methods = {"vmoe": {}, "prc": {"k": 2}, "tgr": {}}
    then = {"pretrain": {"epochs": 3}, "methods": methods}
    sections = claims_for_compare_json(evaluate_claims(asked, shown), then)
    compared = as_json(compare_methods(shown) | sections)
    for section in ("claims", "questions"):
        (entry,) = compared[section].values()
        assert len(entry["settings"]) == 16
    cases = [
        (then, False),
        (then | {"methods": methods | {"tgr": {"k": 1}}}, False),  # not asked
        (then | {"monitor": {"every": 5}}, False),
        (then | {"pretrain": {"epochs": 4}}, True),
        (then | {"methods": methods | {"prc": {"k": 1}}}, True),
    ]
    for number, (now, marked) in enumerate(cases):
        text = small_project(tmp_path / str(number), compared, **now)
        assert ("‡" in row_of(text, "table 4")) == marked
        words = "since 2 of them and 1 of the questions at the end were answered (marked ‡)."
        assert (words in text) == marked
    watched = then | {"monitor": {"every": 5}}
    with_monitor = module.answer_settings_digest(watched, claim(), left_out=())  # as once stored
    assert not module.have_settings_changed(with_monitor, watched, claim())
    assert module.have_settings_changed(
        with_monitor, watched | {"pretrain": {"epochs": 4}}, claim()
    )


def test_two_models_are_held_against_each_other_by_what_was_counted():
    sizes, flops = {"plain_1": 2e8, "other": 1e8}, {"plain_1": 40.0, "other": 41.0}
    cells = {f"parameters_{key}": {"mean": n, "form": "count"} for key, n in sizes.items()}
    cells |= {f"gflops_{key}": {"mean": n, "form": "number"} for key, n in flops.items()}
    compared = {"my_lab.sizes": cells}
    names = {"places": ("plain, 1", "other"), "printed": ("V-MoE", "ERMoE")}
    asked = papers.CalculationRatio(study="ours/sizes", **names, metrics=("parameters", "gflops"))
    assert pages.describe_computed_pair(asked, {}) == ""
    # table S2: 284.9 → 243.0 million parameters, 26.3 → 23.6 GFLOPs
    assert pages.describe_computed_pair(asked, {"calculations": compared}) == (
        "plain, 1 → other: `parameters`: 200,000,000 → 100,000,000, 0.5 times (the paper: 0.853); "
        "`gflops`: 40.0 → 41.0, 1.02 times (the paper: 0.897; the other way)"
    )
    rows = [row for paper in papers.load_papers(ROOT).values() for row in paper.tables]
    counted = questions.QuestionFile(ROOT, "ours/sizes").rounds[0].read_numbers()
    pairs = [asked for row in rows for asked in row.computed]
    assert all(pages.describe_computed_pair(pair, counted) for pair in pairs)


def test_the_rows_of_the_papers_say_what_they_need():
    rounds = {one.name: one for file in questions.load_questions(ROOT) for one in file.rounds}
    for name, paper in papers.load_papers(ROOT).items():
        numbers = [row.number for row in paper.tables]
        assert len(numbers) == len(set(numbers)), name
        claims = [claim for row in paper.tables for claim in row.claims]
        assert len(claims) == len(set(claims)), name
        for row in paper.tables:
            if not row.scheme and not row.needs:
                assert row.paper, f"{name}, {row.number}: the paper's numbers"
            for printed in row.columns:
                document, _, stages = rounds[printed.study].compose()
                asked = read_study(document)
                assert set(printed.methods) <= set(asked.run.methods), row.number
                assert set(printed.metrics) <= set(expected_metrics(asked, stages, printed.phase))
            assert set(row.drawn) <= rounds.keys()


def test_one_method_is_judged_by_two_metrics():
    shown = study(vmoe=[0.1, 0.5, 0.2], prc=[0.2, 0.6, 0.3])
    of_itself = {"against": "prc", "against_metric": "test_accuracy", "better": "lower"}
    (one,) = evaluate_claims([claim(**of_itself)], shown)
    turned = {"metric": "test_accuracy", "against": "prc", "against_metric": "match_top1"}
    (other,) = evaluate_claims([claim(**turned)], shown)
    assert one.difference.value == pytest.approx(-other.difference.value)
    gap = one.ours.interval.value - one.theirs.interval.value
    assert one.difference.value == pytest.approx(gap) and gap != 0 and one.verdict == other.verdict
    (words,) = flat_claims([one])
    assert words.endswith("match_top1 of prc lower than test_accuracy of prc")
    assert "against test_accuracy" in claims_markdown([one])
    with pytest.raises(UserError, match="parameters is a count, and match_top1 a share"):
        evaluate_claims([claim(against="prc", against_metric="parameters")], shown)


def test_the_page_of_all_claims_on_a_full_disk_leaves_the_earlier_one(tmp_path, limited):
    target = tmp_path / pages.CLAIMS_PAGE
    target.parent.mkdir()
    target.write_text("the earlier one")
    with limited(1000), pytest.raises(FileAccessError) as error:
        pages.write_claims_page(tmp_path)
    assert str(error.value).startswith(f"{target}: file too large")
    assert target.read_text() == "the earlier one" and list(target.parent.iterdir()) == [target]
    pages.write_claims_page(tmp_path)
    assert target.read_text().startswith("# The papers' claims")

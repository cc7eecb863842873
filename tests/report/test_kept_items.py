"""Kept items give intervals again; precision of a table; questions and their answers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moecore.core.files import UserError, write_atomic, write_json
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.report.claims import items_and_dates
from moecore.report.claims.answers import compute_required_samples, describe_required_samples
from moecore.report.claims.evaluation import claim_to_json, claims_for_compare_json, evaluate_claims
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.statistics.comparisons import OVER_ITEMS_AND_SEEDS, Difference, SourceVariance
from moecore.study.questions import QuestionFile, QuestionRound
from tests.project import PARAMS, ROOT
from tests.report.test_claims import claim, of_items, question, study
from tools.study_pages import Answer

PLACE = "one.safetensors: round 1"
ASKED = [claim(), claim(better="equivalent", margin=0.1), question()]


def write_result(one: QuestionRound, shown, comparisons=ASKED, **record) -> Path:
    """Store a result of the round; return the file of its items."""
    evaluated = evaluate_claims(comparisons, shown)
    numbers = claims_for_compare_json(evaluated)
    one.question.update_results_file(one.results_key, record | numbers)
    items = one.question.root / "items.safetensors"
    write_tensors(items, items_and_dates.pack_item_values(evaluated, numbers))
    items_and_dates.copy_items_to_results(one, items)
    return one.question.results_path.with_suffix(".safetensors")


@pytest.fixture
def one(tmp_path) -> QuestionRound:
    write_atomic(tmp_path / "params.yaml", "")
    write_atomic(tmp_path / "pipelines/own/one.yaml", "rounds: [{}, {}]")
    return QuestionFile(tmp_path, "own/one").rounds[0]


def drawn_items(steps: int):
    """Two sides of three seeds of 301 items, whose values are steps of a score; 0: any number."""
    sides = np.random.default_rng(3).random((2, 3, 301)) + [[[0.1]], [[0.0]]]
    return of_items(*[[(one * steps).round() if steps else one for one in side] for side in sides])


def test_a_seed_whose_items_are_all_equal_is_kept_beside_one_with_many_values(one):
    sides = np.random.default_rng(3).random((2, 3, 301)) + [[[0.1]], [[0.0]]]
    sides[0, 1] = 0.75
    write_result(one, of_items(*[list(side) for side in sides]))
    assert items_and_dates.verify_stored_items(one) == len(ASKED)


@pytest.mark.parametrize(("steps", "size"), [(1, 38), (4, 301), (0, 602)])
def test_intervals_follow_from_kept_items(one, steps, size):
    path = write_result(one, drawn_items(steps))
    assert items_and_dates.verify_stored_items(one) == len(ASKED)
    tensors, _ = read_tensors(path)
    ours, theirs = (f"1/pretrain/match_top1/{method}" for method in ("prc", "vmoe"))
    assert tensors[ours].nbytes == 3 * size, "bits, a byte, or two an item"
    tensors[ours] = tensors[theirs].clone()
    write_tensors(path, tensors)
    with pytest.raises(UserError, match=f"{PLACE}: claims: 0: PRC, pretrain: .* found"):
        items_and_dates.verify_stored_items(one)


def test_numbers_of_seeds_are_kept_too(one):
    path = write_result(one, study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82]))
    assert items_and_dates.verify_stored_items(one) == len(ASKED)
    path.unlink()
    assert items_and_dates.verify_stored_items(one) == 0


def test_storing_a_round_leaves_the_bytes_of_all_others_also_if_interrupted(one, monkeypatch):
    path = write_result(one, drawn_items(4))
    one.question.update_results_file("tuned", {"rate": 0.1 + 0.2})
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    items, _ = read_tensors(path)
    second = one.question.rounds[1]
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: sys.exit())  # instead of the last step of a write
        with pytest.raises(SystemExit):
            one.question.update_results_file("2", {})
        with pytest.raises(SystemExit):
            items_and_dates.copy_items_to_results(second, one.question.root / "items.safetensors")
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files
    write_result(second, drawn_items(0))
    first, tuned = files[one.question.results_path].split(b',\n"tuned": ')
    stored = one.question.results_path.read_bytes()
    assert stored.startswith(first + b',\n"2": ') and stored.endswith(b',\n"tuned": ' + tuned)
    now, _ = read_tensors(path)
    assert len(now) == 2 * len(items) and all(torch.equal(now[k], items[k]) for k in items)
    assert [items_and_dates.verify_stored_items(part) for part in (one, second)] == [3, 3]


def test_a_file_per_round_as_in_0_3_is_read_and_becomes_one(one):
    second = one.question.rounds[1]
    write_result(one, drawn_items(4))
    path = write_result(second, drawn_items(1))
    parts, (items, _) = one.question.read_results(), read_tensors(path)
    for number, name in (("1", "one"), ("2", "one.2")):
        write_json(path.with_name(f"{name}.json"), parts[number])
        of_round = {k[2:]: values for k, values in items.items() if k.startswith(number)}
        write_tensors(path.with_name(f"{name}.safetensors"), of_round)
    parts["tuned"] = {"methods": {}}
    write_json(path.with_name("one.tuned.json"), parts["tuned"])
    write_json(path.with_name("one.notes.json"), {"somebody's": "file"})
    assert one.question.read_results() == parts
    assert [items_and_dates.verify_stored_items(part) for part in (one, second)] == [3, 3]
    write_result(second, drawn_items(1))
    names = {"one.json", "one.safetensors", "one.notes.json"}
    assert {file.name for file in path.parent.iterdir()} == names
    assert one.question.read_results() == parts and read_tensors(path)[0].keys() == items.keys()
    write_json(one.question.results_path, [parts])
    with pytest.raises(UserError, match=r"one.json: found no results; allowed: the results of ro"):
        one.read_numbers()


def test_a_claim_that_was_not_asked_follows_from_items_kept_for_others(one):
    shown = drawn_items(4)
    path = write_result(one, shown)
    numbers = one.read_numbers() | compare_methods(shown)
    turned = claim(method="vmoe", against="prc", better="lower")
    entry = items_and_dates.compute_claim_from_items(one, numbers, turned)
    (asked,) = evaluate_claims([turned], shown)
    expected = claim_to_json(asked)
    for key in ("mean", "low", "high", "variances", "freedoms", "seeds", "items"):
        assert entry["difference"][key] == pytest.approx(expected["difference"][key])
    assert entry["method"]["mean"] == expected["method"]["mean"] < entry["against"]["mean"]
    assert items_and_dates.compute_claim_from_items(one, numbers, claim(method="tgr")) == {}
    path.unlink()
    assert items_and_dates.compute_claim_from_items(one, numbers, turned) == {}


def test_items_of_another_result_are_refused(one):
    write_result(one, drawn_items(1))
    numbers = one.read_numbers()
    first, *_ = numbers["claims"].values()
    first["difference"]["variances"][0] *= 1.01  # the limits follow from them
    one.question.update_results_file("1", numbers)
    with pytest.raises(UserError, match=f"{PLACE}: claims: 0: PRC, pretrain: .* found"):
        items_and_dates.verify_stored_items(one)
    first["difference"]["variances"][0] /= 1.01
    numbers["questions"].popitem()
    one.question.update_results_file("1", numbers)
    with pytest.raises(UserError, match=f"{PLACE}: found the items of another result"):
        items_and_dates.verify_stored_items(one)


def test_what_would_be_too_many_bytes_is_said_and_left_out(one, monkeypatch, capsys):
    monkeypatch.setattr("moecore.report.claims.items_and_dates.MAX_ITEM_BYTES", 1000)
    path = write_result(one, drawn_items(0))
    assert set(read_tensors(path)[0]) == {f"1/{items_and_dates.RESULT_DIGEST_TENSOR}"}
    assert "items are too large to be stored: match_top1 of prc higher" in capsys.readouterr().err
    assert items_and_dates.verify_stored_items(one) == 0


@pytest.mark.parametrize(("name", "number"), [("tgr/table_3", 1), ("moge/swin", 3)])
def test_intervals_follow_from_the_items_in_git(name, number):  # `moecore claims check`: all
    question = QuestionFile(ROOT, name)
    assert items_and_dates.verify_stored_items(question.round(number)) > 0
    size = question.results_path.with_suffix(".safetensors").stat().st_size
    assert size <= len(question.rounds) * items_and_dates.MAX_ITEM_BYTES


def difference(value: float, by_seeds: float, by_items: float) -> Difference:
    sources = (SourceVariance(by_seeds, 2), SourceVariance(by_items, 99))
    return Difference(value, sources, OVER_ITEMS_AND_SEEDS, 3, 100)


def test_what_makes_a_claim_precise():
    # By seeds alone: A = 3e-4 of 3 seeds, so 9e-4/S. With S = 9 it reaches 2.306 · 0.01 = 0.0231,
    # with S = 8 2.365 · 0.01061 = 0.0251; half of the paper's effect is 0.024.
    for value in (0.033, -5.0):  # whatever was measured
        needed = compute_required_samples(difference(value, 3e-4, 0.0), 0.048)
        assert (needed.seeds, needed.items) == (9, None)
    # By items alone: B = 1e-4 of 100, so 0.01/n, and 1.966²·0.01/0.01² = 387
    needed = compute_required_samples(difference(0.01, 0.0, 1e-4), -0.02)
    assert needed.seeds is None and needed.seeds_of_more_items == 3
    assert needed.items == pytest.approx(387, abs=2)
    assert compute_required_samples(difference(0.0, 1e-4, 1e-4), 1e-9) == (None, None, None)


def answer_of(claim_or_question, entry: dict) -> Answer:
    return Answer("one", "run", claim_or_question, entry, "not run yet", False)


def test_a_table_is_planned_as_a_whole_by_the_papers_effects():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.63, 0.87])  # 0.1 with a deviation of 0.03
    (one,) = evaluate_claims([claim()], shown)
    studies = {"one": {name: {"pretrain": {"seconds": {"mean": 60}}} for name in ("prc", "vmoe")}}
    wide, narrow = (answer_of(claim(effect=effect), claim_to_json(one)) for effect in (0.15, 0.05))
    none = answer_of(claim(), claim_to_json(one))
    later = answer_of(claim(phase="finetune", effect=0.1), {})
    flat = claim_to_json(
        evaluate_claims([claim()], study(vmoe=[0.125, 0.25], prc=[0.25, 0.375]))[0]
    )
    same = answer_of(claim(effect=0.1), flat)
    lines = describe_required_samples([none, same, later, wide], studies)
    # t(2) is 4.303, and 4.303·0.03/√3 = 0.0745, a little less than half of 0.15
    start = "PRC, table 4: ±7.5 pp where half of the paper's effect is "
    words = "(match_top1 of prc higher than of vmoe): "
    assert lines[0] == f"{start}7.5 pp {words}precise enough"
    assert lines[1].endswith("higher than of vmoe: the paper prints no effect")
    assert lines[2].endswith("no interval: identical for all seeds")
    told = "one: PRC, table 4, finetune: match_top1 of prc higher than of vmoe: not run yet"
    assert lines[3] == told
    # t(7)·0.03/√8 = 2.365·0.0106 = 0.0251 > 0.025 > t(8)·0.03/√9: 6 more, 2 min each
    plan = describe_required_samples([wide, narrow], studies)
    assert plan == [f"{start}2.5 pp {words}9 seeds (12 min of training)"]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    day = "2026-12-01T12:00:00Z"
    env = {"GIT_AUTHOR_DATE": day, "GIT_COMMITTER_DATE": day, "PATH": "/usr/bin:/bin"}
    options = {"cwd": folder, "env": env, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.check_output(["git", *who, *words], **options)


@pytest.fixture
def asked(tmp_path) -> Path:
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")
    assert not items_and_dates.has_full_git_history(tmp_path)
    git(tmp_path, "init", "--quiet")
    assert items_and_dates.has_full_git_history(tmp_path)
    return tmp_path


def ask(place: Path, *comparisons) -> QuestionRound:
    content = [one.model_dump(mode="json", exclude_defaults=True) for one in comparisons]
    path = place / "pipelines/own/one.yaml"
    write_atomic(path, json.dumps({"methods": ["vmoe", "tgr"], "claims": content}))
    return QuestionFile(place, "own/one").rounds[0]


def commit(place: Path) -> str:
    git(place, "add", ".")
    git(place, "commit", "--quiet", "-m", "one")
    return git(place, "rev-parse", "HEAD").strip()


def dates(one: QuestionRound) -> list[tuple[bool, bool]]:
    return [
        (dated.is_late, dated.is_refused) for dated in items_and_dates.find_question_commits(one)
    ]


def test_a_question_is_older_than_its_answer(asked):
    one = ask(asked, claim())
    path = Path("pipelines/own/one.yaml")
    assert items_and_dates.find_head_if_committed(asked, path) is None, "it is not committed"
    first = commit(asked)
    assert items_and_dates.find_head_if_committed(asked, path) == first
    assert items_and_dates.find_question_commits(one) == []
    record = {"commit": first, "file": str(path)}
    write_result(one, drawn_items(1), [claim()], asked=record)
    (dated,) = items_and_dates.find_question_commits(one)
    words = "pretrain: match_top1 of prc higher than of vmoe: asked in "
    assert dated.line == f"{words}{first[:8]}, answered in no commit" and not dated.is_late
    second = commit(asked)
    told = f"{words}{first[:8]}, answered in {second[:8]}"
    assert items_and_dates.find_question_commits(one)[0].line == told
    write_json(one.question.results_path, one.read_numbers())
    commit(asked)
    one.question.update_results_file("2", one.read_numbers())
    commit(asked)
    assert items_and_dates.find_question_commits(one)[0].line == told, "another form or round"
    lower = claim(better="lower")
    one = ask(asked, claim(), lower)
    assert items_and_dates.find_head_if_committed(asked, path) is None, "it was edited since"
    with_both = commit(asked)
    assert dates(one) == [(False, False), (True, False)], "another direction, asked later"
    both = ask(asked, lower)
    numbers = one.read_numbers()
    (name,) = numbers["claims"]
    numbers["claims"][name]["asked"]["better"] = "lower"  # as if it had run with this one
    for wrong in ({"commit": None}, {"commit": with_both, "answered": with_both}):
        one.question.update_results_file("1", numbers | {"asked": record | wrong})
        assert dates(both) == [(True, bool(wrong["commit"]))], "in no commit, or with its answer"
    one.question.update_results_file("1", numbers | {"asked": record | {"late": True}})
    assert dates(both) == [(True, False)], "it is known to be late"
    third = commit(asked)
    entries = {name: {"commit": third, "file": str(path)}}
    one.question.update_results_file("1", numbers | {"asked": record | {"entries": entries}})
    assert dates(both) == [(False, False)], "this entry was asked elsewhere"
    entry = numbers["claims"][name] | {"settings": "others"}
    one.question.update_results_file("1", numbers | {"claims": {name: entry}})
    assert dates(both) == [(True, False)], "it waits for a run of today's settings"


def test_claims_of_rounds_are_read_from_the_commit_that_asked(asked):
    content = [one.model_dump(mode="json", exclude_defaults=True) for one in (claim(), question())]
    rounds = [{"seeds": [0], "claims": content[:1]}, {"seeds": [1], "questions": content[1:]}]
    write_atomic(asked / "pipelines/own/one.yaml", json.dumps({"rounds": rounds}))
    record = {"commit": commit(asked), "file": "pipelines/own/one.yaml"}
    second = QuestionFile(asked, "own/one").rounds[1]
    write_result(second, drawn_items(1), [question()], asked=record)
    assert dates(second) == [(False, False)]


def test_claims_by_name_are_those_that_the_paper_had_then(asked):
    content = claim().model_dump(mode="json", exclude_defaults=True)
    paper = {"name": content.pop("paper"), "title": "PRC", "short": "PRC"}
    table = {"number": content.pop("source"), "shows": "matches", "claims": {"match": content}}
    path = asked / "pipelines/mine/paper.yaml"
    write_atomic(path, json.dumps(paper | {"tables": [table]}))
    write_atomic(asked / "pipelines/own/one.yaml", json.dumps({"asks": ["mine/match"]}))
    one = QuestionFile(asked, "own/one").rounds[0]
    files = [file.relative_to(asked) for file in one.question.asking_files]
    assert items_and_dates.find_head_if_committed(asked, *files) is None
    first = commit(asked)
    assert items_and_dates.find_head_if_committed(asked, *files) == first
    record = {"commit": first, "file": "pipelines/own/one.yaml"}
    write_result(one, drawn_items(1), [claim()], asked=record)
    assert dates(one) == [(False, False)]
    content["better"] = "lower"
    write_atomic(path, json.dumps(paper | {"tables": [table]}))
    assert items_and_dates.find_head_if_committed(asked, *files) is None, (
        "the paper's file was edited since"
    )
    assert dates(QuestionFile(asked, "own/one").rounds[0]) == [(True, False)], "the page says so"


def test_an_overwritten_answer_is_reported_until_the_file_lists_it(asked):
    content = claim().model_dump(mode="json", exclude_defaults=True)
    paper = {"name": content.pop("paper"), "title": "PRC", "short": "PRC"}
    table = {"number": content.pop("source"), "shows": "matches", "claims": {"match": content}}
    write_atomic(asked / "pipelines/mine/paper.yaml", json.dumps(paper | {"tables": [table]}))
    asks = {"methods": ["vmoe", "tgr"], "asks": ["mine/match"], "seeds": [0, 1, 2]}
    write_atomic(asked / "pipelines/own/one.yaml", json.dumps(asks))
    one = QuestionFile(asked, "own/one").rounds[0]
    write_result(one, drawn_items(1), [claim()])
    mean = next(iter(one.read_numbers()["claims"].values()))["difference"]["mean"]
    first = commit(asked)
    assert items_and_dates.read_replaced_answers_file(asked) == []
    assert items_and_dates.find_overwritten_answers(one, []) == []
    write_result(one, drawn_items(4), [claim()])
    commit(asked)
    (line,) = items_and_dates.find_overwritten_answers(one, [])
    text = f"{mean:+.4g} of 3 seeds in {first[:8]} was overwritten and is not in pipelines/results"
    assert f"match_top1 of prc higher than of vmoe: {text}/earlier.json" in line
    design = items_and_dates.design_digest_of_round(one, claim())
    before = {"claim": "mine/match", "question": "one", "commit": first, "mean": mean}
    before |= {"seeds": [2, 3], "design": design}
    path = asked / items_and_dates.REPLACED_JSON
    write_atomic(path, json.dumps({"answers": [before]}))
    earlier = items_and_dates.read_replaced_answers_file(asked)
    assert items_and_dates.find_overwritten_answers(one, earlier) == []
    line = f"mine/match: seeds 2 answered it before, one in {first[:8]}"
    assert items_and_dates.find_reused_seeds(one, earlier) == [line]
    for change in ({"seeds": [3, 4]}, {"design": "other"}, {"claim": "mine/other"}):
        assert items_and_dates.find_reused_seeds(one, [before | change]) == []
    del before["seeds"]
    write_atomic(path, json.dumps({"answers": [before]}))
    with pytest.raises(UserError, match=r"earlier.json: found answers\[0\] without seeds; allowed"):
        items_and_dates.read_replaced_answers_file(asked)

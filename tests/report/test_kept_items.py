"""The items that a study keeps give its intervals again, and no other result's do; what would
decide an open claim; when a question was asked.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from moecore.core.files import UserError, read_json, write_json
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.report.claims.claims_page import Answer
from moecore.report.claims.evaluation import claim_entry, compare_json_claims, evaluate_claims
from moecore.report.claims.kept_items import (
    ITEMS,
    NUMBERS,
    RESULT,
    pack_items,
    verify_kept_items,
)
from moecore.report.claims.preregistration import date_questions, has_whole_history
from moecore.report.claims.what_would_decide import describe_open_answers, needed_sample
from moecore.statistics.crossed import BOTH, Difference, VarianceSource
from tests.project import ROOT
from tests.report.test_claims import claim, of_items, question, study

KEPT = sorted(path.parents[1] for path in ROOT.glob(f"pipelines/*/{ITEMS}"))
ASKED = [claim(), claim(better="equivalent", margin=0.1), question()]


def write_study(folder: Path, shown, asked=ASKED) -> Path:
    """Write what the stage compare writes of these results and claims."""
    evaluated = evaluate_claims(asked, shown)
    numbers = compare_json_claims(evaluated)
    write_json(folder / NUMBERS, numbers)
    write_tensors(folder / ITEMS, pack_items(evaluated, numbers))
    return folder


def drawn_items(steps: int):
    """Two sides of three seeds of 301 items, whose values are steps of a score; 0: any number."""
    generator = np.random.default_rng(3)
    sides = generator.random((2, 3, 301)) + [[[0.1]], [[0.0]]]
    return of_items(*[[(one * steps).round() if steps else one for one in side] for side in sides])


@pytest.mark.parametrize(("steps", "size"), [(1, 38), (4, 301), (0, 602)])
def test_intervals_follow_from_kept_items(tmp_path, steps, size):
    folder = write_study(tmp_path, drawn_items(steps))
    assert verify_kept_items(folder) == len(ASKED)
    tensors, _ = read_tensors(folder / ITEMS)
    ours, theirs = (f"pretrain/match_top1/{method}" for method in ("prc", "vmoe"))
    assert tensors[ours].nbytes == 3 * size, "bits, a byte, or two an item"
    tensors[ours] = tensors[theirs].clone()
    write_tensors(folder / ITEMS, tensors)
    with pytest.raises(UserError, match=r"items.safetensors: claims: 0: PRC, pretrain: .* found"):
        verify_kept_items(folder)


def test_numbers_of_seeds_are_kept_too(tmp_path):
    folder = write_study(tmp_path, study(vmoe=[0.1, 0.5, 0.8], prc=[0.11, 0.51, 0.82]))
    assert verify_kept_items(folder) == len(ASKED)
    (folder / ITEMS).unlink()
    assert verify_kept_items(folder) == 0


def test_items_of_another_result_are_refused(tmp_path):
    folder = write_study(tmp_path, drawn_items(1))
    numbers = read_json(folder / NUMBERS)
    numbers["questions"].popitem()
    write_json(folder / NUMBERS, numbers)
    with pytest.raises(UserError, match="items.safetensors: found the items of another result"):
        verify_kept_items(folder)


def test_what_would_be_too_many_bytes_is_said_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moecore.report.claims.kept_items.MOST_BYTES", 1000)
    folder = write_study(tmp_path, drawn_items(0))
    assert set(read_tensors(folder / ITEMS)[0]) == {RESULT}
    assert "not kept, for their size: match_top1 of prc higher" in capsys.readouterr().err
    assert verify_kept_items(folder) == 0


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_studys_intervals_follow_from_the_items_in_git(folder):
    assert verify_kept_items(folder) > 0
    assert (folder / ITEMS).stat().st_size <= 2e6


def difference(value: float, by_seeds: float, by_items: float) -> Difference:
    sources = (VarianceSource(by_seeds, 2), VarianceSource(by_items, 99))
    return Difference(value, sources, BOTH, 3, 100)


def test_what_would_decide():
    # By seeds alone: A = 3e-4 of 3 seeds, so 9e-4/S. With S = 9, t(8) = 2.306 and 0.889, it reaches
    # 3.195 · 0.01 = 0.03195; with S = 8, t(7) = 2.365 and 0.896, 3.261 · 0.01061 = 0.03459
    needed = needed_sample(difference(0.033, 3e-4, 0.0), claim(), "")
    assert (needed.seeds, needed.items) == (9, None)
    # By items alone: B = 1e-4 of 100, so 0.01/n, and (1.960 + 0.842)²·0.01/0.01² = 785
    needed = needed_sample(difference(0.01, 0.0, 1e-4), claim(), "")
    assert needed.seeds is None and needed.seeds_of_more_items == 3
    assert needed.items == pytest.approx(785, abs=5)
    # 0.01 within a margin of 0.02 is as far from it: (1.645 + 0.842)²·0.01/0.01² = 618
    alike = claim(better="equivalent", margin=0.02)
    assert needed_sample(difference(0.01, 0.0, 1e-4), alike, "").items == pytest.approx(618, abs=5)
    assert needed_sample(difference(0.0, 1e-4, 1e-4), claim(), "") == (None, None, None)
    # One of five tests at 1 %: (2.576 + 0.842)²·0.01/0.01² = 1168
    five = needed_sample(difference(0.01, 0.0, 1e-4), claim(), "", tests=5)
    assert five.items == pytest.approx(1168, abs=5)


def answer_of(claim_or_question, entry: dict) -> Answer:
    return Answer("one", claim_or_question, entry, "not run yet", False)


def test_what_is_open_with_holm_or_was_not_run_is_planned():
    shown = study(vmoe=[0.1, 0.5, 0.8], prc=[0.2, 0.63, 0.87])  # p = 0.0287, twice that with Holm
    (one,) = evaluate_claims([claim()], shown)
    alone = claim_entry(one)
    cells = {"seconds": {"mean": 60}}
    studies = {"one": {name: {"pretrain": cells} for name in ("prc", "vmoe")}}
    assert describe_open_answers([answer_of(claim(), alone)], studies) == []
    taken = answer_of(claim(), alone | {"verdict_holm": "open"})
    flat = claim_entry(evaluate_claims([claim()], study(vmoe=[0.125, 0.25], prc=[0.25, 0.375]))[0])
    waiting = [answer_of(question(), flat), answer_of(claim(phase="finetune"), {})]
    lines = describe_open_answers([*waiting, taken, taken], studies)
    assert lines[0] == lines[1]
    words = "one: PRC, table 4, pretrain: match_top1 of prc higher than of vmoe: "
    # t(3) at 1.25 % is 4.177 and at 20 % 0.978: 5.155·0.03/√4 = 0.077 < 0.1; t(2): 7.27·0.03/√3
    assert lines[0].startswith(words) and lines[0].endswith(
        "]: with Holm's correction over 2 claims: 4 seeds (1 more, 2 min of training)"
    )
    start = "one: question, pretrain: match_top1 of prc higher than of vmoe: "
    assert lines[2].startswith(start) and lines[2].endswith("no interval: all seeds are alike")
    assert lines[3].startswith("one: PRC, table 4, finetune: ") and "not run yet" in lines[3]


def git(folder: Path, *words: str, day: str = "2026-12-01") -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    day = f"{day}T12:00:00Z"
    return subprocess.run(
        ["git", *who, *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env={"GIT_AUTHOR_DATE": day, "GIT_COMMITTER_DATE": day, "PATH": "/usr/bin:/bin"},
    ).stdout


def test_a_question_is_older_than_its_answer(tmp_path):
    assert not has_whole_history(tmp_path)
    git(tmp_path, "init", "--quiet")
    assert has_whole_history(tmp_path)

    def commit(asked, day, shown=None):
        content = [one.model_dump(mode="json", exclude_defaults=True) for one in asked]
        (tmp_path / "params.yaml").write_text(json.dumps({"claims": content}), encoding="utf-8")
        if shown is not None:
            write_study(tmp_path, shown, asked)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", "one", day=day)

    def dates(since="2026-12-01T00:00Z"):
        return [(one.is_late, one.is_refused) for one in date_questions(tmp_path, since)]

    commit([claim()], "2026-12-01")
    commit([claim()], "2026-12-02", drawn_items(1))
    hashes = git(tmp_path, "log", "--format=%h").split()
    (one,) = date_questions(tmp_path)
    assert one.line == (
        f"pretrain: match_top1 of prc higher than of vmoe: asked in {hashes[1]}, "
        f"answered in {hashes[0]}"
    )
    lower = claim(better="lower")
    commit([claim(), lower], "2026-12-03")
    assert dates() == [(False, False), (True, True)]
    assert dates(since="2026-12-04T00:00Z")[1] == (True, False)
    commit([claim(), lower], "2026-12-05", drawn_items(0))
    assert dates() == [(False, False), (False, False)]
    no_worse = claim(better="no_worse", margin=0.1)
    commit([no_worse], "2026-12-06", drawn_items(1))
    assert dates() == [(True, True)], "asked with its answer"
    numbers = read_json(tmp_path / NUMBERS)
    (entry,) = numbers["claims"].values()
    write_json(tmp_path / NUMBERS, {"claims": {"a": entry | {"settings": "others"}}})
    assert dates() == [(True, False)], "it waits for a run of today's settings"


@pytest.mark.skipif(not has_whole_history(ROOT), reason="git has no history here, or a part of it")
@pytest.mark.parametrize("folder", sorted(ROOT.glob("pipelines/*/")), ids=lambda one: one.name)
def test_no_study_answers_what_was_asked_later(folder):
    assert [one.line for one in date_questions(folder) if one.is_refused] == []

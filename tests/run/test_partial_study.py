"""Part of a study: its tracked results stay, and claims wait for the rest."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from moecore.core.files import UserError, read_json, write_json
from moecore.core.source_layout import ROOT
from moecore.pipeline.study_runs import keep_results, why_results_stay, write_run_folder
from moecore.report.claims.evaluation import describe_waiting_claims, split_answerable_comparisons
from moecore.stages.compare import Params
from moecore.study.params_file import write_assignments
from moecore.study.questions import QuestionFile, Round
from moecore.study.settings import read_params

NAME = "moge/fashion_150_epochs"
NUMBERS = {"moe": {}, "claims": {"0: one": {}}}


@pytest.fixture
def study(tmp_path, monkeypatch) -> Round:
    """A question with claims in a project of its own, whose run folder is written."""
    for name in ("params.yaml", "dvc.yaml", f"pipelines/{NAME}.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    one = QuestionFile(Path(), NAME).rounds[0]
    assert write_run_folder(one) == ["written"] and write_run_folder(one) == []
    return one


def finish(one: Round) -> None:
    """Leave what `dvc repro` leaves at the end, as far as results go."""
    write_json(one.folder / "reports/compare.json", NUMBERS)
    (one.folder / "reports/items.safetensors").write_bytes(b"items")

    def entry(path: str) -> dict[str, str]:
        return {"path": path, "md5": hashlib.md5((one.folder / path).read_bytes()).hexdigest()}

    copied = [entry(f"reports/{name}") for name in ("compare.json", "items.safetensors")]
    stages = {"compare": {"deps": [entry("params.yaml")]}, "numbers": {"outs": copied}}
    (one.folder / "dvc.lock").write_text(json.dumps({"stages": stages}), encoding="utf-8")


def test_results_of_the_whole_study_are_kept_with_who_asked(study):
    assert why_results_stay(study).startswith(f"{study.folder}/reports/compare.json does not exist")
    finish(study)
    assert keep_results(study) == study.results
    asked = {"commit": None, "file": f"pipelines/{NAME}.yaml"}
    assert read_json(study.results) == {"asked": asked} | NUMBERS
    assert study.results.with_suffix(".safetensors").read_bytes() == b"items"
    params = read_params(Params, str(study.folder / "params.yaml"))
    ready, waiting = split_answerable_comparisons(params.claims, params.run)
    assert ready == list(params.claims) and not waiting


def test_a_part_leaves_the_results_and_its_claims_wait(study):
    finish(study)
    write_assignments(study.folder / "params.yaml", ["run.methods=[moge]", "run.seeds=[0]"])
    with pytest.raises(UserError, match="left as it is: this run has other settings, run.methods"):
        keep_results(study)
    assert not study.results.exists()
    params = read_params(Params, str(study.folder / "params.yaml"))
    ready, waiting = split_answerable_comparisons([*params.claims, *params.questions], params.run)
    assert ready == [] and waiting
    said = describe_waiting_claims(waiting, params.run)
    assert "\n" not in said and "method moe" in said and "a second seed" in said


def test_numbers_that_are_not_of_these_settings_are_not_kept(study):
    finish(study)
    write_assignments(study.folder / "params.yaml", ["run.seeds=[0]"])
    finish(study)
    lines = write_run_folder(study)
    assert lines == ["run.seeds: [0] → [0, 1, 2]"], "the question's, again"
    assert "params.yaml is not what the stages compare and numbers saw" in why_results_stay(study)
    finish(study)
    write_json(study.folder / "reports/compare.json", {})
    assert "reports/compare.json is not what the stages" in why_results_stay(study)


def test_who_asked_is_known_before_the_run_and_stays(study):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", *who, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    Path(".gitignore").write_text("/.runs/\n/data\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    first = git("rev-parse", "HEAD").strip()
    write_run_folder(study)
    assert read_json(study.folder / "asked.json")["commit"] == first
    finish(study)
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    write_run_folder(study)
    assert read_json(study.folder / "asked.json")["commit"] == first, "this commit has seen answers"
    assert git("status", "--porcelain").strip() == ""
    done = subprocess.run(["git", "log", "--format=%s"], cwd=study.folder, capture_output=True)
    assert done.stdout == b"written by moecore\n", "DVC needs a repository that has these files"

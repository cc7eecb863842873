"""Inputs that change while a stage runs; a part of a study waits for the rest."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moecore.core import config, source_layout
from moecore.core.files import UserError, read_json, write_json
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.pipeline import code_hashes, dvc_yaml
from moecore.pipeline.run_folders import explain_stale_results, store_results, write_run_folder
from moecore.report.claims.evaluation import describe_waiting_claims, split_answerable_comparisons
from moecore.run import history_file, stage_inputs
from moecore.run.history_file import read_dvc_locks, read_lines
from moecore.run.run_record import record_run
from moecore.stages.compare import Params
from moecore.study import params_reader, questions, yaml_document
from moecore.study.params_writer import write_assignments
from moecore.study.stages import STAGES
from tests.project import PARAMS, Project

STAGE = "pretrain@dense-0"
SHORT = "pretrain:\n  {epochs: 2,"
LONG = SHORT.replace("2", "12")
RATE = "batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 4,\n"
OTHER = RATE.replace("0.001", "0.002")


@pytest.fixture
def project(copied) -> Project:
    """A copy of the finished project whose pretraining takes longer."""
    copied.edit(SHORT, LONG)
    return copied


def checkpoints(project: Project) -> list[Path]:
    return list((project.folder / ".state/pretrain").rglob("checkpoint.safetensors"))


def repro_with_edit(project: Project, edit: Callable[[], None]) -> str:
    """Let ``dvc repro`` train, edit at the first checkpoint; return what the failed run printed."""
    before = read_dvc_locks(project.folder)[STAGE]
    given = {"cwd": project.folder, "env": project.environment, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = subprocess.Popen(["dvc", "repro", STAGE], **given, **pipes)
    while not checkpoints(project):
        assert started.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.02)
    edit()
    said, _ = started.communicate()
    assert started.returncode != 0 and "Traceback" not in said, said
    assert read_dvc_locks(project.folder)[STAGE] == before
    return said


def logged_steps(project: Project) -> list[int]:
    history = read_lines(project.folder / "artifacts/history/pretrain/dense/0")
    return [step for step, _, _ in history_file.logged_points(history)]


def test_a_setting_edited_while_a_stage_runs_files_no_result_and_is_named(project):
    said = repro_with_edit(project, lambda: project.edit(RATE, OTHER))
    (line,) = [line for line in said.splitlines() if "learning_rate" in line]
    assert "params.yaml:35:" in line and ": pretrain.learning_rate: was 0.001" in line
    assert "is 0.002" in line
    refused_at = logged_steps(project)[-1]
    assert checkpoints(project)
    project.edit(OTHER, f"{RATE}  # as before\n")
    assert project.repro(STAGE) == ["code", STAGE]
    history = read_lines(project.folder / "artifacts/history/pretrain/dense/0")
    assert any("resumed" in line for line in history)
    assert refused_at < logged_steps(project)[-1], "noticed at a checkpoint, not at the end"
    ran_with = read_dvc_locks(project.folder)[STAGE]["params"]["params.yaml"]
    assert ran_with["pretrain"]["learning_rate"] == 0.001 and not checkpoints(project)


CODE = "moecore/training/settings.py"


def test_code_edited_while_a_stage_runs_files_no_result_and_is_named(project):
    """After its imports, at its checkpoints, and where another edit came before it began."""
    project.edit("epochs: 12,", "epochs: 13,")  # not what the run cache has of the test before
    project.forked = False  # from now on it runs the code of its own folder, which is edited
    file = project.folder / CODE
    text = file.read_text(encoding="utf-8")
    said = repro_with_edit(project, lambda: file.write_text(text + "\nEDITED = True\n"))
    (line,) = [line for line in said.splitlines() if CODE in line]
    assert f"{file}: was edited after the stage `code` hashed it" in line and checkpoints(project)
    refused = project.attempt([sys.executable, "-m", "moecore.stages.pretrain", "dense", "0"])
    assert refused.returncode == 1 and f"{file}: was edited" in refused.stderr, "at its start"
    file.write_text(f"# as before\n{text}")
    assert project.repro(STAGE) == ["code", STAGE]
    history = read_lines(project.folder / "artifacts/history/pretrain/dense/0")
    assert any("resumed" in line for line in history)


def test_a_forked_stage_has_the_code_that_its_server_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(stage_inputs, "_imported_by_server", {})
    stage_inputs.store_hashes_of_imported_sources()
    file, other = Path(CODE), Path("moecore/training/loop.py")
    hashes = {path.as_posix(): stage_inputs.hash_source_file(path) for path in (file, other)}
    write_json(tmp_path / "hashes.json", hashes)
    stage_inputs.StageInputs(None, (), [tmp_path / "hashes.json"])
    write_json(tmp_path / "hashes.json", hashes | {file.as_posix(): "of a later edit"})
    with pytest.raises(UserError, match=f"{CODE}: was edited"):
        stage_inputs.StageInputs(None, (), [tmp_path / "hashes.json"])


def test_a_stage_compares_the_code_that_dvc_files_its_result_under(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS, encoding="utf-8")
    code_hashes.write_all_hashes("params.yaml")
    names = {"${item.method}": "vmoe", "${key}": "pretrain", "${item.what}": "invariance"}
    for stage in [name for name, row in STAGES.items() if row.reads]:
        defined = dvc_yaml.build_dvc_entry(STAGES[stage])
        deps = [path for path in defined.get("do", defined)["deps"] if "/settings/" not in path]
        for template, name in names.items():
            deps = [path.replace(template, name) for path in deps]
        code = [path for path in map(Path, deps) if path.is_relative_to("artifacts/code")]
        listed = [file for path in code for file in (path.glob("*") if path.is_dir() else [path])]
        named = {file for file in listed if file.is_file()}
        what = stage
        phase_and_method: tuple[str, ...] = ("pretrain", "vmoe")
        if stage in ("measure", "calculate"):
            what = "invariance"
        if stage == "calculate":
            phase_and_method = ()
        assert {*stage_inputs.list_code_hash_json_files(what, *phase_and_method)} == named, stage


def test_dvc_tells_settings_apart_that_are_called_size(copied):
    """Its run cache does not: dvc/stage/cache.py leaves this name out (see test_plan.py)."""
    card = copied.folder / "artifacts/data/finetune/card.json"
    finetune = "finetune: {kind: digits, size: "
    for size in (16, 32):
        copied.write(PARAMS.replace(f"{finetune}24", f"{finetune}{size}"))
        assert copied.repro("prepare@finetune") == ["code", "prepare@finetune"]
        assert json.loads(card.read_text())["size"] == size


class SizedParams(config.Config):
    epochs: int = 3
    parts: tuple[dict, ...] = ({"kind": "load", "weight": 0.1},)


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("params.yaml")
    path.write_text("epochs: 3\nparts:\n  - {kind: load, weight: 0.1}\n")
    return path


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("epochs: 4\nparts: [{kind: load, weight: 0.1}]", "params.yaml:1:1: epochs: was 3"),
        ("epochs: 3\nparts:\n  - {kind: load, weight: 0.2}", "parts.0.weight: was 0.1"),
        ("epochs: 3\nparts: []", "parts.0.kind: was 'load'"),
        ("# moved\nparts: [{weight: 1e-1, kind: load}]\nepochs: 3\n", ""),
        ("parts: [{weight: 0.1, kind: load}]\n", ""),
    ],
)
def test_what_is_compared_are_values(file, text, key):
    with contextlib.ExitStack() as stack:
        if key:
            stack.enter_context(pytest.raises(UserError, match=key))
        with record_run("pretrain", SizedParams(), method="vmoe", seed=0):
            file.write_text(text)
    status = read_lines("artifacts/history/pretrain/vmoe/0")[-1]["status"]
    assert status == ("FAILED" if key else "FINISHED")


def test_an_artifact_that_is_another_at_the_end_is_named(file):
    data = Path("artifacts/data/pretrain/card.json")
    data.parent.mkdir(parents=True)
    for now, allowed in (("1", True), ("2", False)):
        data.write_text("1")
        said = f"{data}: was changed"
        with contextlib.nullcontext() if allowed else pytest.raises(UserError, match=said):
            inputs = stage_inputs.StageInputs(None, [data.parent])
            with record_run("calibrate", None, inputs=inputs):
                data.write_text(now)


def test_a_whole_document_is_compared(file):
    document = yaml_document.load_yaml_document(str(file))
    file.write_text(f"# a comment\n{file.read_text()}")
    stage_inputs.refuse_changed_document(document)
    file.write_text("epochs: 3\nparts: []\nmore: 1\n")
    with pytest.raises(UserError, match=r"params.yaml:2:1: parts.0.kind: was 'load'"):
        stage_inputs.refuse_changed_document(document)


NAME = "moge/fashion_150_epochs"
NUMBERS = {"moe": {}, "claims": {"0: one": {}}}


@pytest.fixture
def study(tmp_path, monkeypatch) -> questions.QuestionRound:
    """A question with claims in a project of its own, whose run folder is written."""
    for name in ("params.yaml", "dvc.yaml", f"pipelines/{NAME}.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_layout.ROOT / name, tmp_path / name)
    (tmp_path / "data").symlink_to(source_layout.ROOT / "data")
    monkeypatch.chdir(tmp_path)
    one = questions.QuestionFile(Path(), NAME).rounds[0]
    assert write_run_folder(one) == ["written"] and write_run_folder(one) == []
    return one


def finish(one: questions.QuestionRound) -> None:
    """Leave what `dvc repro` leaves at the end, as far as results go."""
    write_json(one.folder / "reports/compare.json", NUMBERS)
    write_tensors(one.folder / "reports/items.safetensors", {"items": torch.ones(2)})

    def entry(path: str) -> dict[str, str]:
        return {"path": path, "md5": hashlib.md5((one.folder / path).read_bytes()).hexdigest()}

    copied = [entry(f"reports/{name}") for name in ("compare.json", "items.safetensors")]
    stages = {"compare": {"deps": [entry("params.yaml")]}, "numbers": {"outs": copied}}
    (one.folder / "dvc.lock").write_text(json.dumps({"stages": stages}), encoding="utf-8")


def test_results_of_the_whole_study_are_kept_with_who_asked(study):
    assert explain_stale_results(study).startswith(
        f"{study.folder}/reports/compare.json does not exist"
    )
    finish(study)
    assert store_results(study) == study.question.results_path
    asked = {"commit": None, "file": f"pipelines/{NAME}.yaml"}
    assert read_json(study.question.results_path) == {"1": {"asked": asked} | NUMBERS}
    tensors, _ = read_tensors(study.question.results_path.with_suffix(".safetensors"))
    assert tensors["1/items"].tolist() == [1, 1]
    params = params_reader.read_stage_params(Params, str(study.folder / "params.yaml"))
    ready, waiting = split_answerable_comparisons(params.claims, params.run)
    assert ready == list(params.claims) and not waiting


def test_a_part_leaves_the_results_and_its_claims_wait(study):
    finish(study)
    write_assignments(study.folder / "params.yaml", ["run.methods=[moge]", "run.seeds=[0]"])
    with pytest.raises(UserError, match="left as it is: this run has other settings, run.methods"):
        store_results(study)
    assert not study.question.results_path.exists()
    params = params_reader.read_stage_params(Params, str(study.folder / "params.yaml"))
    ready, waiting = split_answerable_comparisons([*params.claims, *params.questions], params.run)
    assert ready == [] and waiting
    said = describe_waiting_claims(waiting, params.run)
    assert "\n" not in said and "method moe" in said and "a second seed" in said


def test_numbers_that_are_not_of_these_settings_are_not_kept(study):
    finish(study)
    write_assignments(study.folder / "params.yaml", ["run.seeds=[0]"])
    finish(study)
    assert write_run_folder(study) == ["run.seeds: [0] → [0, 1, 2]"], "the question's, again"
    assert "params.yaml is not what the stages compare and numbers saw" in explain_stale_results(
        study
    )
    finish(study)
    write_json(study.folder / "reports/compare.json", {})
    assert "reports/compare.json is not what the stages" in explain_stale_results(study)


def test_who_asked_is_known_before_the_run_and_stays(study):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *who, *words], text=True)

    git("init", "--quiet")
    Path(".gitignore").write_text("/.runs/\n/data\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    first = git("rev-parse", "HEAD").strip()
    text = study.question.path.read_text(encoding="utf-8")
    study.question.path.write_text(f"{text}# more\n", encoding="utf-8")
    assert write_run_folder(study)[-1].startswith(f"pipelines/{NAME}.yaml: not committed")
    study.question.path.write_text(text, encoding="utf-8")
    assert write_run_folder(study) == []
    assert read_json(study.folder / "asked.json")["commit"] == first
    finish(study)
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    write_run_folder(study)
    assert read_json(study.folder / "asked.json")["commit"] == first, "this commit has seen answers"
    assert git("status", "--porcelain").strip() == ""
    done = subprocess.run(["git", "log", "--format=%s"], cwd=study.folder, capture_output=True)
    assert done.stdout == b"written by moecore\n", "DVC needs a repository that has these files"

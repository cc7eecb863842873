"""Settings and files that change while a stage runs: its result is filed under neither."""

import contextlib
import subprocess
import time
from pathlib import Path

import pytest

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.run.history_file import read_dvc_locks, read_lines
from moecore.run.inputs import refuse_changed_document
from moecore.run.run_record import record_run
from moecore.study.reading.document import load_yaml_document
from tests.project import PARAMS, Project

STAGE = "pretrain@dense-0"
LONG = PARAMS.replace("pretrain:\n  {epochs: 2,", "pretrain:\n  {epochs: 12,")
RATE = "batch: 64, learning_rate: 0.001, log_every: 5, checkpoint_every: 4,\n"
OTHER = RATE.replace("0.001", "0.002")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("inputs"), LONG).with_dvc()


def checkpoints(project: Project) -> list[Path]:
    return list((project.folder / ".state/pretrain").rglob("checkpoint.safetensors"))


def test_a_setting_edited_while_a_stage_runs_files_no_result_and_is_named(project):
    words = ["dvc", "repro", STAGE]
    started = subprocess.Popen(
        words,
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not checkpoints(project):
        assert started.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.02)
    project.edit(RATE, OTHER)
    said, _ = started.communicate()
    assert started.returncode != 0 and "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "learning_rate" in line]
    assert "params.yaml:35:" in line and ": pretrain.learning_rate: was 0.001" in line
    assert "is 0.002" in line
    assert STAGE not in read_dvc_locks(project.folder)
    assert checkpoints(project)

    project.edit(OTHER, f"{RATE}  # as before\n")
    assert project.repro(STAGE) == ["code", STAGE]
    history = read_lines(project.folder / "artifacts/history/pretrain/dense/0")
    assert any("resumed" in line for line in history)
    ran_with = read_dvc_locks(project.folder)[STAGE]["params"]["params.yaml"]
    assert ran_with["pretrain"]["learning_rate"] == 0.001
    assert not checkpoints(project)


class Params(Config):
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
        with record_run("pretrain", Params(), method="vmoe", seed=0):
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
            with record_run("calibrate", None, inputs=[data.parent]):
                data.write_text(now)


def test_a_whole_document_is_compared(file):
    document = load_yaml_document(str(file))
    file.write_text(f"# a comment\n{file.read_text()}")
    refuse_changed_document(document)
    file.write_text("epochs: 3\nparts: []\nmore: 1\n")
    with pytest.raises(UserError, match=r"params.yaml:2:1: parts.0.kind: was 'load'"):
        refuse_changed_document(document)

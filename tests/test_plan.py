"""What would run, why and how long."""

import json
import os
import subprocess
import sys
from pathlib import Path

from moecore.code_hashes import code_hashes
from moecore.files import write_json
from moecore.history import record
from moecore.plan import Planned, parse_dot, past_seconds, plan, settled
from moecore.sources import ROOT

EDGES = parse_dot('strict digraph {\n"prepare";\n"prepare" -> "train@a";\n"prepare" -> "train@b";\n"train@a" -> "compare";\n"train@b" -> "compare";\n}')


def test_changes_flow_downstream_in_order():
    status = {"train@a": [{"changed deps": {"params.yaml": {"methods.a.k": "modified"}}}], "other": [{"changed command": None}, "always changed"]}
    assert plan(status, EDGES, {"train@b": 4.0, "compare": 1.0}) == [
        Planned("other", ("changed command", "always changed"), None),
        Planned("train@a", ("methods.a.k modified",), 4.0),
        Planned("compare", ("after train@a",), 1.0),
    ]


def test_nothing_to_do():
    assert plan({}, EDGES, {}) == []


def test_an_edit_ends_where_the_hashes_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(*code_hashes("stage", "code"))
    commands = {"same": "python -m stages.code stage code", "train": "python -m stages.pretrain a 0"}
    commands["edited"] = "python -m stages.code stage prepare"
    (tmp_path / "artifacts/code/stages/prepare.json").write_text('{"moecore/files.py": "0"}')
    (tmp_path / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {stage: {"cmd": command} for stage, command in commands.items()}}))
    edited = [{"changed deps": {"moecore": "modified"}}]
    assert settled({"same": edited, "edited": edited, "train": edited, "new": edited}) == {"same"}
    assert settled({"same": [*edited, "changed command"]}) == settled({"same": [{"changed outs": {"x.json": "deleted"}}]}) == set()
    planned = plan({"same": edited, "train@a": edited}, [("same", "train@b"), ("train@a", "compare")], {}, {"same"})
    assert [item.stage for item in planned] == ["same", "train@a", "compare"]


def test_past_seconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_TRACKING", "off")
    monkeypatch.delenv("DVC_STAGE", raising=False)
    with record("train", method="a", seed=0):
        pass
    assert list(past_seconds()) == ["train@a-0"]


def test_with_dvc(tmp_path):
    (tmp_path / "params.yaml").write_text("a: 1\n")
    stages = {
        "first": {"cmd": "cp params.yaml out", "params": ["a"], "outs": ["out"]},
        "second": {"cmd": "cp out last", "deps": ["out"], "outs": ["last"]},
    }
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": stages}))

    def run(*words: str) -> str:
        env = os.environ | {"PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1", "COLUMNS": "120"}
        return subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    run("dvc", "init", "--no-scm", "-q")
    assert "2 stages" in run("moecore.plan")
    run("dvc", "repro", "-q")
    assert "Nothing would run" in run("moecore.plan")
    Path(tmp_path, "params.yaml").write_text("a: 2\n")
    shown = run("moecore.plan")
    assert "a modified" in shown and "after first" in shown

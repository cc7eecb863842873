"""What would run, why and how long."""

import json
from pathlib import Path

import pytest
from dvc.repo import Repo

from moecore.core.files import UserError, write_json
from moecore.core.sources import CODE
from moecore.pipeline.code_hashes import code_files
from moecore.pipeline.plan import (
    Pipeline,
    Planned,
    asked,
    changed_by_code,
    main,
    past_seconds,
    plan,
)
from moecore.run.history import record
from moecore.study.document import parse

EDGES = [
    ("prepare", "train@a"),
    ("prepare", "train@b"),
    ("train@a", "compare"),
    ("train@b", "compare"),
    ("code", "prepare"),
    ("code", "train@a"),
    ("code", "train@b"),
]


def test_changes_flow_downstream_in_order():
    status = {
        "train@a": [{"changed deps": {"params.yaml": {"methods.a.k": "modified"}}}],
        "other": [{"changed command": None}, "always changed"],
    }
    assert plan(Pipeline(status, EDGES), {"train@b": 4.0, "compare": 1.0}) == [
        Planned("other", ("changed command", "always changed"), None),
        Planned("train@a", ("methods.a.k modified",), 4.0),
        Planned("compare", ("after train@a",), 1.0),
    ]


def test_nothing_to_do():
    assert plan(Pipeline({}, EDGES), {}) == []


EDITED = {"code": [{"changed deps": {"moecore/nn": "modified"}}]}


def test_other_code_runs_what_depends_on_it_and_nothing_else():
    assert [item.stage for item in plan(Pipeline(EDITED, EDGES), {}, {})] == ["code"]
    planned = plan(Pipeline(EDITED, EDGES), {}, {"train@a": ("x.py edited",)})
    assert [item.stage for item in planned] == ["code", "train@a", "compare"]
    assert planned[1].reasons == ("x.py edited",)
    assert len(plan(Pipeline(EDITED, EDGES), {})) == 5, "where it is not known, all of it"


PARAMS = "run: {methods: [a]}\nmethods: {a: {router: {kind: hash}}}\n"


def finished(folder: Path) -> dict[str, dict[str, str]]:
    """What the stages ``code`` and ``train`` leave behind."""
    (folder / "params.yaml").write_text(PARAMS)
    files = code_files(parse(PARAMS))
    for name, hashes in files.items():
        write_json(CODE / name, hashes)
    stages = {
        "train@a": {"deps": [{"path": "artifacts/code/methods/a.json"}]},
        "transfer": {"deps": [{"path": "artifacts/code/methods"}]},
        "other": {"deps": [{"path": "artifacts/code/stages/pretrain.json"}]},
    }
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}))
    return files


def test_which_stages_an_edit_concerns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = finished(tmp_path)
    assert changed_by_code(Pipeline(EDITED, EDGES)) == {}
    assert changed_by_code(Pipeline({"code": ["always changed"]}, EDGES)) == {}
    router = "moecore/nn/routers/hash.py"
    write_json(CODE / "methods/a.json", files["methods/a.json"] | {router: "0"})
    found = changed_by_code(Pipeline(EDITED, EDGES))
    assert found == {"train@a": (f"{router} edited",), "transfer": (f"{router} edited",)}
    assert changed_by_code(Pipeline({}, EDGES)) == {}, "DVC found nothing to hash again"
    lost = {"code": [{"changed outs": {"artifacts/code": "deleted"}}]}
    assert changed_by_code(Pipeline(lost, EDGES)) is None


def test_past_seconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    with record("train", method="a", seed=0):
        pass
    assert list(past_seconds()) == ["train@a-0"]


def test_with_dvc(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("a: 1\n")
    stages = {
        "first": {"cmd": "cp params.yaml out", "params": ["a"], "outs": ["out"]},
        "second": {"cmd": "cp out last", "deps": ["out"], "outs": ["last"]},
    }
    Path("dvc.yaml").write_text(json.dumps({"stages": stages}))

    def shown() -> str:
        capsys.readouterr()
        main()
        return capsys.readouterr().out

    Repo.init(no_scm=True).close()
    assert "2 stages" in shown()
    with Repo() as repo:
        repo.reproduce()
    assert "Nothing would run" in shown()
    Path("params.yaml").write_text("a: 2\n")
    text = shown()
    assert "a modified" in text and "after first" in text


def test_dvcs_own_words_where_there_is_no_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="dvc: you are not inside of a DVC repository"):
        asked()

"""What would run, why and how long."""

import json
from pathlib import Path

import pytest
import torch
from dvc.repo import Repo

from moecore.core.files import UserError, write_json
from moecore.core.sources import CODE
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
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
from moecore.pipeline.scale import Model, Peaks, step, table
from moecore.run.history import record
from moecore.study.document import load, parse
from moecore.study.params import validate_whole
from moecore.study.study import Study
from moecore.tasks.classification import Classification
from tests import project

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


def test_a_step_on_paper_by_hand():
    model = Model(parameters=1000, active=500, flops=2e6, kept=100.0)
    peaks = Peaks(flops=1e9, memory=1e6, links=1e6, network=1e3)
    # 8 images: 3 · 8 · 2e6 / 1e9 s of products, 28 · 1000 / 1e6 s of AdamW; nothing is sent.
    assert step(model, 8, 1, 1, peaks) == (1, 8, 16_000 + 800, 0.0, pytest.approx(0.048 + 0.028))
    # Two ranks: 4000 bytes of gradients each way in the ring, hidden behind 2 · 4 · 2e6 / 1e9 s.
    two = step(model, 8, 2, 1, peaks)
    assert two == (2, 4, 16_000 + 4000 + 400, 4000.0, pytest.approx(0.024 + 0.028))
    # Sharded by two: half of what the optimizer holds; over the network nothing hides all of it.
    many = step(model, 16, 16, 2, peaks)
    sent = 2 * 15 / 16 * 4000
    assert many.memory == 8000 + 4000 + 100
    assert many.seconds == pytest.approx(0.006 + 0.014 + sent / 1e3 - 0.004)
    # 600 of the parameters are of experts, which lie apart on two of four ranks: 400 go around
    # four, 300 around two; of 50 numbers an image half travel, there and back and twice again.
    apart = step(model._replace(experts=600, sent=50.0), 8, 4, 2, peaks, 2)
    gradients, rows = 2 * 3 / 4 * 1600 + 2 * 1 / 2 * 1200, 4 * 2 * 2 * 50 / 2
    assert apart.traffic == gradients + rows
    assert apart.seconds == pytest.approx(0.012 + 0.014 + rows / 1e6)


def test_every_method_is_counted_on_paper(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(project.PARAMS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    study = validate_whole(Study, load("params.yaml"))
    rows = [line.split(" | ") for line in table(study, Peaks())]
    assert [row[0].strip("| ") for row in rows[2:]] == [
        name for name in ("dense", "vmoe", "tgr") for _ in (1, 8, 64)
    ]
    assert [row[4] for row in rows[2:5]] == ["64", "8", "1"]
    torch.manual_seed(0)
    real = Vit(patch=8, width=32, depth=4, heads=2, mlp_ratio=2).build(
        ImageSpec(
            channels=1,
            size=16,
            mean=(0.5,),
            std=(0.5,),
            task=Classification(classes=tuple("0123456789")),
        )
    )
    assert rows[2][1] == f"{sum(one.numel() for one in real.parameters()):,}"

"""The whole of params.yaml: our own file is in order, and what does not fit is found before anything runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecore.files import StageError
from moecore.sources import ROOT
from moecore.study import check, schema

FILE = ROOT / "params.yaml"
STUDIES = [FILE, *sorted((ROOT / "pipelines").glob("*/params.yaml"))]


@pytest.fixture
def problems(tmp_path):
    """The problems of our own params.yaml after replacements."""
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())

    def find(*replacements: tuple[str, str]) -> str:
        text = FILE.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text, f"{old!r} is not in params.yaml"
            text = text.replace(old, new, 1)
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(StageError) as caught:
            check(tmp_path / "params.yaml")
        return str(caught.value)

    return find


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_our_files_are_in_order(path):
    study = check(path)
    assert set(study.run.methods) <= set(study.methods)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_the_schema_is_fresh(path):
    written = json.loads(path.with_name("params.schema.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(schema(path))), "run `python -m moecore.study schema`"
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=params.schema.json\n")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_the_schema_accepts_the_file(path):
    jsonschema = pytest.importorskip("jsonschema")
    from moecore.yaml12 import load

    jsonschema.validate(load(str(path)).data, schema(path))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("methods: [dense, vmoe, prc", "methods: [dense, vmeo, prc", ": run.methods[1]: found 'vmeo', did you mean 'vmoe'?; allowed: dense, vmoe, "),
        ("methods: [dense, vmoe, prc", "methods: [dense, vmoe, prc, vmoe", ": run.methods[3]: 'vmoe' is there twice; keep one"),
        ("seeds: [0", "seeds: [-1", ": run.seeds[0]: found -1; allowed: integers ≥ 0"),
        ("seeds: [0", "seeds: [0, 0", ": run.seeds[1]: 0 is there twice; keep one"),
        ("\n  dense: {}\n", "\n  dense: {}\n  soft-moe: {}\n", ": methods.soft-moe: found the name 'soft-moe'; allowed: small letters"),
        ("\npretrain:\n", "\npretrian:\n", ": pretrian: unknown key, did you mean 'pretrain'?"),
        ("\nmodel: {kind: vit, ", "\nmodel: {", ": model: kind is missing; allowed: kind: single_layer | vit"),
        (
            "\nclaims: []",
            "\nclaims: [{paper: PRC, says: steadier, metric: match_top1, method: prcc, against: vmoe, better: higher}]",
            ": claims[0].method: found 'prcc', did you mean 'prc'?; allowed: dense, vmoe, prc",
        ),
        ("calibrator: {kind: temperature}", "calibrator: {}", ": calibrate.calibrator: kind is missing; allowed: kind: temperature | linear"),
    ],
)
def test_misfits(problems, old, new, expected):
    assert expected in problems((old, new))


def test_problems_of_all_sorts_come_together_in_the_order_of_the_file(problems):
    lines = problems(("seeds: [0", "seeds: [0, 0"), ("\npretrain:\n", "\npretrain:\n  unknown: 1\n")).split("\n")
    assert len(lines) == 2 and "run.seeds[1]" in lines[0] and "pretrain.unknown: unknown key" in lines[1]


def test_a_regularizer_needs_what_is_there(tmp_path):
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    text = FILE.read_text(encoding="utf-8")
    start = text.index("\nteacher:\n") + 1
    end = text.index("\n\n", start)
    text = text[:start] + "teacher: {kind: no_teacher}" + text[end:]
    text = text.replace("\n  dense: {}\n", "\n  dense: {regularizers: [{kind: importance, weight: 0.1}]}\n")
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(StageError) as caught:
        check(tmp_path / "params.yaml")
    assert "methods.dense.regularizers[0]: importance needs a router, but the method has no router" in str(caught.value)
    assert "methods.tgr.regularizers[0]: router_kl needs a teacher, but teacher.kind is no_teacher; allowed: dense, timm" in str(caught.value)


def test_the_command(tmp_path):
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (tmp_path / "params.yaml").write_text(FILE.read_text(encoding="utf-8").replace("seeds: [0", "seeds: [zero", 1), encoding="utf-8")

    def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-m", "moecore.study", *words], cwd=cwd, env=env, capture_output=True, text=True)

    assert run("check").returncode == 0 and "in order" in run("check").stdout
    wrong = run("check", cwd=tmp_path)
    assert wrong.returncode == 1 and wrong.stderr.startswith("params.yaml:") and "found 'zero' (str); allowed: integer" in wrong.stderr
    assert run("schema", cwd=tmp_path).returncode == 0 and (tmp_path / "params.schema.json").exists()

"""Import closures and code fingerprints: a new part changes nothing, an edited part exactly what uses it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moecore.files import StageError
from moecore.sources import ROOT, closure, fingerprint, part_files

TREE = {
    "moecore/__init__.py": '"""Only a docstring."""',
    "moecore/config.py": "",
    "moecore/helper.py": "from moecore import config",
    "moecore/layers/__init__.py": "WIDTH = 1",
    "moecore/layers/block.py": "import moecore.config",
    "moecore/routers/__init__.py": "from moecore.routers.top import Top",
    "moecore/routers/top.py": "from moecore.routers import gates\nfrom .plan import Plan",
    "moecore/routers/gates.py": "",
    "moecore/routers/plan.py": "from moecore.helper import x",
    "moecore/routers/other.py": "",
    "moecore/experts/both.py": "",
    "moecore/regularizers/both.py": "",
    "stages/train.py": "import torch\nfrom moecore.routers import Top\nfrom moecore.layers.block import Block\n\ndef f():\n    import moecore.helper",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(files: set[Path]) -> set[str]:
    return {file.as_posix() for file in files}


def test_closure_follows_modules_but_no_family(tree):
    reached = names(closure("stages/train.py", tree))
    assert reached == {"stages/train.py", "moecore/layers/__init__.py", "moecore/layers/block.py", "moecore/config.py", "moecore/helper.py"}


def test_parts_bring_their_helpers(tree):
    section = {"router": {"kind": "top", "k": 2}, "experts": {"kind": "both"}, "deep": [{"x": {"kind": "unknown"}}]}
    assert names(part_files(section, tree)) == {
        "moecore/routers/top.py", "moecore/routers/gates.py", "moecore/routers/plan.py", "moecore/helper.py", "moecore/config.py", "moecore/experts/both.py",
    }  # fmt: skip


def test_a_kind_in_two_families(tree):
    assert names(part_files({"regularizers": [{"kind": "both"}]}, tree)) == {"moecore/regularizers/both.py"}
    assert names(part_files([{"kind": "both"}], tree)) == {"moecore/regularizers/both.py", "moecore/experts/both.py"}


def test_only_an_edit_of_a_used_part_changes_the_fingerprint(tree):
    from moecore import sources

    def print_of() -> dict:
        sources._imports.cache_clear()
        return fingerprint(part_files({"router": {"kind": "top"}}, tree), tree)

    before = print_of()
    (tree / "moecore/routers/new.py").write_text("x = 1")
    (tree / "moecore/routers/__init__.py").write_text("from moecore.routers.new import x")
    (tree / "moecore/routers/other.py").write_text("x = 1")
    assert print_of() == before
    (tree / "moecore/routers/plan.py").write_text("y = 2")
    assert print_of() != before


def test_broken_and_missing_files_are_named(tree):
    with pytest.raises(StageError, match=r"stages/none.py: no such file"):
        closure("stages/none.py", tree)
    (tree / "stages/bad.py").write_text("x = (")
    with pytest.raises(StageError, match=r"stages/bad.py:1: not valid Python"):
        closure("stages/bad.py", tree)


def run_code(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "stages.code", *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_the_stage_code(tmp_path):
    (tmp_path / "params.yaml").write_text("methods: {vmoe: {router: {kind: noisy_top_k}}}\nrobustness: {attacks: [{kind: fgsm}]}\n")
    assert run_code(tmp_path, "methods", "vmoe").returncode == 0
    assert "moecore/routers/noisy_top_k.py" in json.loads((tmp_path / "artifacts/code/methods/vmoe.json").read_text())
    assert run_code(tmp_path, "section", "robustness.attacks").returncode == 0
    assert "moecore/attacks/fgsm.py" in json.loads((tmp_path / "artifacts/code/robustness/attacks.json").read_text())
    assert run_code(tmp_path, "stage", "pretrain").returncode == 0
    reached = {file.as_posix() for file in closure("stages/pretrain.py")}
    assert "moecore/training/loop.py" in reached and set(json.loads((tmp_path / "artifacts/code/stages/pretrain.json").read_text())) == reached
    wrong = run_code(tmp_path, "methods", "vmo")
    assert wrong.returncode == 1 and "did you mean 'vmoe'?" in wrong.stderr and "Traceback" not in wrong.stderr
    assert "stages/pretrian.py: no such file" in run_code(tmp_path, "stage", "pretrian").stderr
    assert "found 'stages'; allowed: stage, methods, section" in run_code(tmp_path, "stages", "pretrain").stderr
    assert "usage: python -m stages.code stage SCRIPT" in run_code(tmp_path, "stage").stderr


def test_the_stage_code_imports_nothing_heavy():
    code = "import sys, stages.code; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert time.perf_counter() - begun < 5

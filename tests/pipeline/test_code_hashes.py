"""The stage ``code``: one file for every script, measurement, method and section."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.pipeline.code_hashes import code_files
from moecore.study.document import parse
from tests.project import PARAMS as WHOLE

PARAMS = """\
run: {methods: [vmoe]}
data: {pretrain: {kind: digits}}
model: {kind: vit}
methods: {vmoe: {router: {kind: noisy_top_k}}, other: {router: {kind: hash}}}
calibrate: {calibrator: {kind: temperature}}
invariance: {images: 16}
corruptions: {attacks: [{kind: fgsm}]}
claims: []
"""


@pytest.fixture(scope="module")
def files() -> dict[str, dict[str, str]]:
    return code_files(parse(PARAMS))


def test_there_is_a_file_for_whatever_a_stage_depends_on(files):
    scripts = {f"stages/{file.name[:-3]}.json" for file in (ROOT / "stages").glob("[a-z]*.py")}
    assert {name for name in files if name.startswith("stages/")} == scripts
    assert {name for name in files if not name.startswith("stages/")} == {
        "methods/vmoe.json",
        "sections/data.pretrain.json",
        "sections/calibrate.json",
        "sections/corruptions.json",
        "sections/invariance.json",
        "measure/corruptions.json",
        "measure/invariance.json",
    }


def test_a_method_has_all_that_its_model_is_made_of(files):
    assert {"moecore/nn/routers/noisy_top_k.py", "moecore/nn/backbones/vit.py"} <= set(
        files["methods/vmoe.json"]
    )
    assert "moecore/nn/routers/hash.py" not in files["methods/vmoe.json"]


def test_a_measurement_has_the_parts_that_its_section_names(files):
    found = set(files["measure/corruptions.json"])
    assert {"moecore/measure/corruptions.py", "moecore/attacks/fgsm.py"} <= found
    assert "moecore/attacks/pgd.py" not in found


def test_only_compare_depends_on_the_report(files):
    reporting = {name for name, code in files.items() if any("moecore/report/" in f for f in code)}
    assert reporting == {"stages/compare.json"}


@pytest.mark.parametrize("room", ["study", "run", "tracking", "pipeline"])
def test_nothing_depends_on_rooms_that_decide_no_result(files, room):
    assert not [name for name, code in files.items() if any(f"moecore/{room}/" in f for f in code)]


def test_a_method_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"methods.vmo: missing, did you mean 'vmoe'"):
        code_files(parse(PARAMS.replace("[vmoe]", "[vmo]")))


def run_code(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "stages.code", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_stage_writes_them(tmp_path):
    (tmp_path / "params.yaml").write_text(WHOLE)
    files = code_files(parse(WHOLE))
    assert run_code(tmp_path).returncode == 0
    folder = tmp_path / "artifacts/code"
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*.json")}
    assert found == set(files)
    assert json.loads((folder / "methods/vmoe.json").read_text()) == files["methods/vmoe.json"]
    (tmp_path / "params.yaml").write_text(WHOLE.replace("digits, size: 16", "digits, size: 15"))
    misfit = run_code(tmp_path)
    assert misfit.returncode == 1 and "Traceback" not in misfit.stderr
    assert ": model.patch: found 8; allowed: a divisor of the image size 15" in misfit.stderr
    (tmp_path / "params.yaml").write_text("run: [")
    wrong = run_code(tmp_path)
    assert wrong.returncode == 1
    assert "params.yaml:2" in wrong.stderr and "Traceback" not in wrong.stderr
    assert "usage: python -m stages.code" in run_code(tmp_path, "stage").stderr


def test_it_imports_nothing_heavy():
    code = "import sys, stages.code; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

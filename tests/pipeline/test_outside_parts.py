"""A project whose router, regularizer and measurement are of a package of its own, run by DVC."""

import json
import sys
from collections.abc import Iterator

import pytest

from moecore.core.files import read_json
from moecore.core.outside_packages import allow_packages
from moecore.core.package_versions import package_versions
from moecore.pipeline.dvc_file import stage_definitions, study_dvc_yaml_texts
from tests.my_lab import SECTIONS, forget_my_lab, write_my_lab
from tests.project import Project

PARAMS = f"""\
{SECTIONS}
run:
  {{methods: [mine, calm, usual], seeds: [0], phases: [pretrain],
  measurements: [my_lab.brightness], thorough: [pretrain]}}
data: {{pretrain: {{kind: digits, size: 16}}}}
model: {{kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}}
methods:
  mine:
    router: {{kind: my_lab.cosine, k: 2}}
    experts: &experts {{kind: mlp, number: 4, hidden_ratio: 1}}
  calm:
    router: &usual {{kind: noisy_top_k, k: 2}}
    experts: *experts
    regularizers: [{{kind: my_lab.calm, weight: 0.01}}]
  usual: {{router: *usual, experts: *experts}}
teacher: {{kind: no_teacher}}
teacher_router: {{steps: 2, batch: 64, learning_rate: 0.01}}
pretrain: {{epochs: 1, batch: 64, learning_rate: 0.001}}
calibrate: {{calibrator: {{kind: temperature}}}}
claims: []
questions: []
"""
STAGES = ["prepare", "teacher", "teacher_router", "pretrain", "calibrate", "measure", "compare"]
OF_MINE = {
    "teacher_router@mine-0",
    "pretrain@mine-0",
    "calibrate@pretrain-mine-0",
    "measure@my_lab.brightness-pretrain-mine-0",
}
LAST = {"compare", "numbers"}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Project]:
    """A finished project with the package in its src/, which Python finds no longer afterwards."""
    path = list(sys.path)
    made = Project(tmp_path_factory.mktemp("outside"), PARAMS).with_dvc()
    write_my_lab(made.folder / "src")
    texts = study_dvc_yaml_texts(stage_definitions(STAGES), {})
    (made.folder / "dvc.yaml").write_text(texts["dvc.yaml"], encoding="utf-8")
    made.repro()
    yield made
    sys.path[:] = path
    allow_packages((), ())
    forget_my_lab()


def edit(project: Project, module: str, more: str) -> None:
    file = project.folder / f"src/my_lab/{module}.py"
    file.write_text(file.read_text(encoding="utf-8") + more, encoding="utf-8")


def stages_with(project: Project, words: str) -> set[str]:
    return {stage for stage, reasons in project.stale().items() if words in reasons}


def test_its_results_are_there(project):
    folder = project.folder
    assert '"brightness' in (folder / "reports/compare.json").read_text(encoding="utf-8")
    assert "Brightness" in (folder / "reports/index.html").read_text(encoding="utf-8")
    card = read_json(folder / "artifacts/pretrain/mine/0/model.json")
    assert card["moe"]["router"]["kind"] == "my_lab.cosine"
    header = json.loads(
        (folder / "artifacts/history/pretrain/mine/0/history.jsonl")
        .read_text("utf-8")
        .split("\n")[0]
    )
    assert card["versions"] == header["versions"] == package_versions(["my_lab"])
    history = (folder / "artifacts/history/pretrain/calm/0/history.jsonl").read_text("utf-8")
    assert "my_lab.calm" in history
    hashes = read_json(folder / "artifacts/code/methods/mine.json")
    assert {"my_lab/cosine.py", "my_lab/directions.py"} <= set(hashes)
    assert "my_lab/calm.py" not in hashes


def test_an_edit_reruns_what_uses_the_file_and_nothing_else(project):
    """A helper, a comment, a loss, a page; ``moecore plan`` says what ``dvc repro`` then runs."""
    assert project.stale() == {}
    edit(project, "directions", "# a comment\n")
    assert project.stale() == {}
    edit(project, "directions", "\nEDITED = True\n")
    assert stages_with(project, "my_lab/directions.py edited") == OF_MINE
    planned = project.moecore("plan").stdout
    assert "pretrain@mine-0" in planned and "my_lab/directions.py edited" in planned
    assert "usual" not in planned and "calm" not in planned
    ran = set(project.repro()) - {"code"}
    assert OF_MINE - ran <= {"calibrate@pretrain-mine-0"} and ran <= OF_MINE | LAST
    edit(project, "calm", "\nEDITED = True\n")
    changed = stages_with(project, "my_lab/calm.py edited")
    assert changed == {stage.replace("mine", "calm") for stage in OF_MINE}
    edit(project, "pages/brightness", "\nEDITED = True\n")
    assert stages_with(project, "my_lab/pages/brightness.py edited") == {"compare"}
    edit(project, "brightness", "\nEDITED = True\n")
    measured = {f"measure@my_lab.brightness-pretrain-{one}-0" for one in ("mine", "calm", "usual")}
    assert stages_with(project, "my_lab/brightness.py edited") == {*measured, "compare"}

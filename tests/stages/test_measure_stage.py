"""The stage ``measure``: any measurement of any model; what it skips; it goes on after a kill.

From a training to explorer.html by the real stages.
"""

import json
import re

import pytest

from moecore.core.files import UserError
from moecore.measure import MEASUREMENTS, stability
from moecore.measure.base import read_result
from moecore.nn.backbones.image import ImageSpec
from moecore.pipeline.dvc_file import study_dvc
from moecore.training.artifacts import save_model, save_no_guide
from stages.measure import measure
from tests.measure.subjects import digits, in_run
from tests.project import Project
from tests.routed import tiny

SECTIONS = {
    "routing": {
        "images": 8,
        "augmentations": ["flip"],
        "sweeps": {"k": [1], "threshold": [], "images": 4},
    },
    "stability": {"images": 4, "steps": 2, "sigmas": [0.1, 0.2]},
    "cohort_checks": {},
    "methods": {"dense": {}},
}
NAMES = ("dense", "teacher_routed")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with data and two models of two phases; the second routes by its teacher."""
    folder = tmp_path_factory.mktemp("measure")
    (folder / "artifacts/teacher_router/dense/0").mkdir(parents=True)
    save_no_guide(folder / "artifacts/teacher_router/dense/0")
    for phase in ("pretrain", "finetune"):
        data = digits(folder / "artifacts/data" / phase)
        for name in NAMES:
            target = folder / "artifacts" / phase / name / "0"
            target.mkdir(parents=True)
            save_model(target, tiny(name, ImageSpec.from_card(data.card)))
    return folder


@pytest.fixture
def inside(project, monkeypatch):
    in_run(monkeypatch, project, **SECTIONS)


def found(what, phase, method):
    path = f"artifacts/measured/{what}/{phase}/{method}/0.json"
    return read_result(path, MEASUREMENTS[what].result, what)


@pytest.mark.usefixtures("inside")
def test_the_teacher_is_asked_on_the_images_of_the_pretraining_alone():
    for phase in ("pretrain", "finetune"):
        measure("routing", phase, "teacher_routed", 0)
    routing = found("routing", "pretrain", "teacher_routed")
    assert routing.teacher_agreement == 1, "it decides"
    assert found("routing", "finetune", "teacher_routed").teacher_agreement is None


@pytest.mark.usefixtures("inside")
def test_what_does_not_apply_says_why():
    measure("routing", "pretrain", "dense", 0)
    assert found("routing", "pretrain", "dense").skipped == "a dense model has no routing"
    measure("cohort_checks", "pretrain", "dense", 0)
    assert "classes, not ages" in found("cohort_checks", "pretrain", "dense").skipped


@pytest.mark.usefixtures("inside")
def test_the_section_of_another_measurement_is_not_read():
    with pytest.raises(UserError, match="lipschitz"):
        measure("lipschitz", "pretrain", "dense", 0)
    with pytest.raises(UserError, match="found heat; allowed: routing, invariance"):
        measure("heat", "pretrain", "dense", 0)


@pytest.mark.usefixtures("inside")
def test_a_killed_measurement_goes_on_with_the_same_bits(monkeypatch):
    measure("stability", "pretrain", "dense", 0)
    path = "artifacts/measured/stability/pretrain/dense/0.json"
    whole = json.loads(open(path).read())
    asked = []
    row = stability.noise_row

    def noise_row(model, clean, pixels, labels, task, sigma, batch):
        asked.append(sigma)
        if asked == [0.1, 0.2]:
            raise KeyboardInterrupt
        return row(model, clean, pixels, labels, task, sigma, batch)

    monkeypatch.setattr(stability, "noise_row", noise_row)
    with pytest.raises(KeyboardInterrupt):
        measure("stability", "pretrain", "dense", 0)
    measure("stability", "pretrain", "dense", 0)
    assert asked == [0.1, 0.2, 0.2]
    assert json.loads(open(path).read()) == whole


PARAMS = """\
run:
  {methods: [dense, vmoe], seeds: [0], phases: [pretrain], measurements: [explorer],
  thorough: [pretrain]}
data: {pretrain: {kind: digits, size: 16, train_limit: 128, test_limit: 40}}
model: {kind: vit, patch: 8, width: 32, depth: 4, heads: 2, mlp_ratio: 2}
methods:
  dense: {}
  vmoe:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 4, hidden_ratio: 1}
teacher_router: {steps: 2, batch: 64, learning_rate: 0.01}
pretrain: {epochs: 2, batch: 64, learning_rate: 0.001}
explorer:
  {images: 4, gallery: 20, sigmas: [0.2], epsilons: [0.05], attack: {kind: pgd, steps: 2},
  augmentations: [shift]}
"""
DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def explored(tmp_path_factory) -> Project:
    explored = Project(tmp_path_factory.mktemp("explorer"), PARAMS)
    text = study_dvc(["prepare", "teacher_router", "pretrain", "measure"])
    (explored.folder / "dvc.yaml").write_text(text, encoding="utf-8")
    explored.stage("prepare", "pretrain")
    for method in ("dense", "vmoe"):
        explored.stage("teacher_router", method, "0")
        explored.stage("pretrain", method, "0")
        explored.stage("measure", "explorer", "pretrain", method, "0")
    return explored


def page(explored: Project) -> str:
    explored.stage("compare")
    return (explored.folder / "reports/explorer.html").read_text(encoding="utf-8")


def test_the_page_shows_both_methods_and_the_epochs(explored):
    found = json.loads(DATA.search(page(explored))[1])["phases"]
    dense, vmoe = found[0]["methods"]
    assert "nothing to see" in dense["reason"]
    shown = vmoe["model"]["shown"]
    kinds = [one["kind"] for one in shown]
    assert kinds == ["clean", "noise", "attack", "augmentation", "epoch", "epoch"]
    clean = shown[0]["trace"]
    last = shown[-1]["trace"]
    assert last["answers"][:4] == clean["answers"], "the last epoch is the trained model"
    assert shown[-1]["label"] == "epoch 2 of 2"
    first = shown[4]["trace"]
    assert first["values"][:4] != clean["values"]


def test_a_missing_result_names_the_stage_that_writes_it(explored):
    file = explored.folder / "artifacts/measured/explorer/pretrain/vmoe/0.json"
    text = file.read_text(encoding="utf-8")
    file.unlink()
    failed = explored.attempt_stage("compare")
    file.write_text(text, encoding="utf-8")
    assert failed.returncode == 1
    words = "explorer/pretrain/vmoe/0.json: no such file; `dvc repro measure` writes it"
    assert words in failed.stderr


def test_without_the_measurement_the_page_says_how_to_get_it(explored):
    explored.edit("measurements: [explorer]", "measurements: []")
    text = page(explored)
    explored.edit("measurements: []", "measurements: [explorer]")
    assert "Name explorer in run.measurements of params.yaml" in " ".join(text.split())
    assert "<script" not in text

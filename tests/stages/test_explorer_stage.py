"""From a training to explorer.html by the real stages."""

import json
import re

import pytest

from moecore.pipeline.dvc_file import study_dvc
from tests.project import Project

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
def project(tmp_path_factory) -> Project:
    project = Project(tmp_path_factory.mktemp("explorer"), PARAMS)
    text = study_dvc(["prepare", "teacher_router", "pretrain", "measure"])
    (project.folder / "dvc.yaml").write_text(text, encoding="utf-8")
    project.stage("prepare", "pretrain")
    for method in ("dense", "vmoe"):
        project.stage("teacher_router", method)
        project.stage("pretrain", method, "0")
        project.stage("measure", "explorer", "pretrain", method, "0")
    return project


def page(project: Project) -> str:
    project.stage("compare")
    return (project.folder / "reports/explorer.html").read_text(encoding="utf-8")


def test_the_page_shows_both_methods_and_the_epochs(project):
    found = json.loads(DATA.search(page(project))[1])["phases"]
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


def test_a_missing_result_names_the_stage_that_writes_it(project):
    file = project.folder / "artifacts/measured/explorer/pretrain/vmoe/0.json"
    text = file.read_text(encoding="utf-8")
    file.unlink()
    failed = project.attempt_stage("compare")
    file.write_text(text, encoding="utf-8")
    assert failed.returncode == 1
    words = "explorer/pretrain/vmoe/0.json: no such file; the stage measure writes it"
    assert words in failed.stderr


def test_without_the_measurement_the_page_says_how_to_get_it(project):
    project.edit("measurements: [explorer]", "measurements: []")
    text = page(project)
    project.edit("measurements: []", "measurements: [explorer]")
    assert "Name explorer in run.measurements of params.yaml" in " ".join(text.split())
    assert "<script" not in text

"""The stage ``measure``: any measurement of any model; what it skips; it goes on after a kill."""

import json

import pytest

from moecore.core.files import UserError
from moecore.measure import MEASUREMENTS, stability
from moecore.measure.base import read_result
from moecore.nn.backbones.image import ImageSpec
from moecore.training.artifacts import save_model, save_no_guide
from stages.measure import measure
from tests.measure.subjects import digits
from tests.measure.trained import in_run
from tests.routed import tiny

SECTIONS = {
    "routing": {
        "images": 8,
        "augmentations": ["flip"],
        "sweeps": {"k": [1], "threshold": [], "images": 4},
    },
    "stability": {"images": 4, "steps": 2, "sigmas": [0.1, 0.2]},
    "cohort_checks": {},
}
NAMES = ("dense", "teacher_routed")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with data and two models of two phases; the second routes by its teacher."""
    folder = tmp_path_factory.mktemp("measure")
    (folder / "artifacts/teacher_router/dense").mkdir(parents=True)
    save_no_guide(folder / "artifacts/teacher_router/dense")
    for phase in ("pretrain", "finetune"):
        data = digits(folder / "artifacts/data" / phase)
        for name in NAMES:
            target = folder / "artifacts" / phase / name / "0"
            target.mkdir(parents=True)
            save_model(target, tiny(name, ImageSpec.from_card(data.card)))
    return folder


@pytest.fixture(autouse=True)
def inside(project, monkeypatch):
    in_run(monkeypatch, project, **SECTIONS)


def found(what, phase, method):
    path = f"artifacts/measured/{what}/{phase}/{method}/0.json"
    return read_result(path, MEASUREMENTS[what].result, what)


def test_the_teacher_is_asked_on_the_images_of_the_pretraining_alone():
    for phase in ("pretrain", "finetune"):
        measure("routing", phase, "teacher_routed", 0)
    assert 0 <= found("routing", "pretrain", "teacher_routed").teacher_agreement <= 1
    assert found("routing", "finetune", "teacher_routed").teacher_agreement is None


def test_what_does_not_apply_says_why():
    measure("routing", "pretrain", "dense", 0)
    assert found("routing", "pretrain", "dense").skipped == "a dense model has no routing"
    measure("cohort_checks", "pretrain", "dense", 0)
    assert "classes, not ages" in found("cohort_checks", "pretrain", "dense").skipped


def test_the_section_of_another_measurement_is_not_read():
    with pytest.raises(UserError, match="lipschitz"):
        measure("lipschitz", "pretrain", "dense", 0)
    with pytest.raises(UserError, match="found heat; allowed: routing, invariance"):
        measure("heat", "pretrain", "dense", 0)


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

"""Calibration of classes, before and after, and which calibrator fits which task.

The checks of a small cohort that is not simulated.
"""

import pytest
import torch

from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure import cohort_checks
from moecore.measure.base import Subject, at_once, read_result
from moecore.measure.calibration import (
    Calibrate,
    Files,
    Result,
    calibrate,
    labels_of,
    quality,
    refuse,
)
from moecore.measure.calibrators.temperature import FittedTemperature
from moecore.measure.cohort_checks import CohortChecks
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.predict import predictions
from moecore.statistics.intervals import wilson
from moecore.tasks.class_scores import brier, confidence, ece, nll, reliability
from moecore.tasks.classification import Classification
from stages import calibrate as stage
from tests.attacks.models import CLASSES, SETS, YEARS
from tests.measure.subjects import (
    built,
    digits,
    in_run,
    measured_twice,
    trained,
    write_digits,
    write_models,
)
from tests.volumes import write_cohort

SETTINGS = Calibrate(calibrator={"kind": "temperature"}, resamples=100, batch=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The model, its data, what was measured, and the folder of all."""
    folder = tmp_path_factory.mktemp("calibration")
    data = write_digits(folder)
    subject = Subject(trained(data, None), data)
    files = Files("x", folder, folder, folder / "out")
    return subject, calibrate(subject, SETTINGS, files), folder


def test_quality_by_hand():
    # Four images, two classes: sure by 0.9, 0.9, 0.6, 0.6; right, wrong, right, right.
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]]).double().log()
    found = quality(Classification(classes=("a", "b")), logits, torch.tensor([0, 1, 1, 0]), 100)
    assert (found.score.value, found.score.low, found.score.high) == wilson(3, 4)
    assert found.brier.value == pytest.approx((0.02 + 1.62 + 0.32 + 0.32) / 4)
    assert found.ece.value == pytest.approx(0.4)
    expected = torch.tensor([0.9, 0.1, 0.6, 0.6]).double().log()
    assert found.nll.value == pytest.approx(-float(expected.mean()))
    assert sum(found.bins.count) == 4 and found.nll.low <= found.nll.value <= found.nll.high


def test_the_test_split_before_and_after(made):
    subject, found, folder = made
    fitted = FittedTemperature.from_json((folder / "out/calibrator.json").read_text())
    assert (found.temperature, found.at_limit) == (fitted.temperature, fitted.at_limit)
    test = subject.data.test
    labels = labels_of(test.labels)
    logits, _ = predictions(subject.model, test.images, 16, routing=False)
    for when, said in ((found.before, logits), (found.after, fitted.apply(logits))):
        hits = said.argmax(1) == labels
        assert when.nll.value == pytest.approx(float(nll(said, labels).mean()))
        assert when.brier.value == pytest.approx(float(brier(said, labels).mean()))
        assert when.ece.value == pytest.approx(ece(confidence(said), hits))
        assert when.bins == reliability(confidence(said), hits)
    assert found.before.score == found.after.score
    hits = CLASSES.unpacked(found.scores, len(labels))
    assert torch.equal(hits, logits.argmax(1) == labels)
    assert (found.validation_images, found.test_images) == (len(subject.data.validation.labels), 60)


def test_a_result_is_read_back_as_it_was(made, tmp_path):
    (tmp_path / "0.json").write_text(made[1].model_dump_json())
    assert read_result(tmp_path / "0.json", Result, "calibrate") == made[1]


@pytest.mark.parametrize(
    ("kind", "task", "says"),
    [
        ("temperature", YEARS, "kind: found temperature; .* regression; allowed: linear"),
        ("linear", CLASSES, "kind: found linear; .* classification; allowed: temperature"),
        ("temperature", SETS, r"no calibrator .* multi_label .*leave pretrain out of run.phases"),
    ],
)
def test_a_calibrator_of_another_task_is_refused(kind, task, says):
    with pytest.raises(UserError, match=f"calibrate.*{says}"):
        refuse(Calibrate(calibrator={"kind": kind}), task, "pretrain")


def test_the_stage_writes_what_was_measured(tmp_path, monkeypatch):
    write_models(tmp_path, write_digits(tmp_path))
    in_run(monkeypatch, tmp_path, calibrate=SETTINGS.model_dump(mode="json"))
    stage.calibrate("pretrain", "dense", 0)
    path = tmp_path / "artifacts/measured/calibrate/pretrain/dense/0.json"
    found = read_result(path, Result, "calibrate")
    written = (tmp_path / "artifacts/calibrate/pretrain/dense/0/calibrator.json").read_text()
    assert FittedTemperature.from_json(written).temperature == found.temperature


def settings(**changes) -> CohortChecks:
    small = {"subjects": 3, "ages": (20, 50, 80), "rescans": 4, "batch": 16, "resamples": 100}
    return CohortChecks(**small | {"years": 200} | changes)


def test_ages_must_rise():
    with pytest.raises(ValueError, match="rising ages, each once"):
        settings(ages=(50, 20))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("cohort") / "pretrain"
    folder.mkdir()
    return write_cohort(folder, simulated=False)


@pytest.fixture(scope="module")
def subject(cohort) -> Subject:
    torch.manual_seed(0)
    backbone = Vit3d(patch=8, width=8, depth=1, heads=1, mlp_ratio=1)
    return Subject(backbone.build(ImageSpec.from_card(cohort.card)).eval(), cohort)


@pytest.fixture(scope="module")
def found(subject) -> cohort_checks.Result:
    assert cohort_checks.applies(subject) is None
    return measured_twice(cohort_checks.measure, subject, settings())


def test_a_real_cohort(found):
    assert found.simulated is False
    assert found.ageing is None
    assert "kind: phantom" in found.reasons["ageing"]
    assert list(found.isolated) == ["wm", "gm", "csf"]
    assert found.rescan.pairs == 1
    assert found.rescan.mae == found.whole.mae
    assert found.n_test == 40
    assert 5 < found.median_mae < 15


def test_the_batch_plays_no_part(subject, found):
    again = cohort_checks.measure(subject, settings(batch=5), at_once)
    for region, row in found.isolated.items():
        assert again.isolated[region].mae == pytest.approx(row.mae, rel=1e-5)


def test_sessions_that_are_too_far_apart_are_no_rescan(subject):
    reasons = cohort_checks.measure(subject, settings(years=1e-6), at_once).reasons
    assert "no test participant has two sessions" in reasons["rescan"]


def test_data_with_classes_are_not_what_it_is_for(tmp_path):
    data = digits(tmp_path)
    subject = Subject(built(SingleLayer(), None, data, 1), data)
    assert "classes, not ages" in cohort_checks.applies(subject)

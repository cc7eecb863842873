import math
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from moecore import Prepared, UserError, predict_in_batches
from moecore.backbones import Vit, Vit3d
from moecore.core.config import read_json_settings
from moecore.core.source_layout import allowing_packages
from moecore.data.sources.dialects import Dialects
from moecore.measure import base, cohort_checks, values
from moecore.measure import calibration as module
from moecore.measure.calibrators.base import read_calibrator
from moecore.measure.calibrators.linear import FittedLine, FittedLinesByGroup, Linear
from moecore.measure.calibrators.temperature import FittedTemperature, Temperature
from moecore.measure.probes import simulated_people as simulated
from moecore.nn.backbones.base_model import ImageSpec
from moecore.stages import calibrate as stage
from moecore.statistics.intervals import wilson
from moecore.tasks import Cells, Classification, class_task
from moecore.testing import check_calibrator, check_measurement
from tests.attacks.models import CLASSES, SETS, YEARS
from tests.measure.subjects import compute_without_cache, in_run
from tests.my_lab import forget_package, write_my_lab

SETTINGS = module.Calibrate(calibrator={"kind": "temperature"}, batch=16)


@pytest.fixture(scope="module")
def made(run):
    folder, models = run
    files = module.CalibrationPaths("x", folder, folder, folder / "out")
    return models["dense"], calibrated(models["dense"], SETTINGS, files), folder


def calibrated(
    subject: base.MeasuredModel, settings: module.Calibrate, files: module.CalibrationPaths
) -> values.Found:
    calibration = module.ClassCalibration(settings=settings, files=files)
    return calibration.collect_result(subject, compute_without_cache)


def test_quality_by_hand():
    # Four images, two classes: sure by 0.9, 0.9, 0.6, 0.6; right, wrong, right, right.
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]]).double().log()
    task = Classification(classes=("a", "b"))
    found = module.prediction_quality(task, logits, torch.tensor([0, 1, 1, 0]))
    assert (found.score.value, found.score.low, found.score.high) == wilson(3, 4)
    assert found.brier.value == pytest.approx((0.02 + 1.62 + 0.32 + 0.32) / 4)
    assert found.ece.value == pytest.approx(0.4)
    expected = torch.tensor([0.9, 0.1, 0.6, 0.6]).double().log()
    assert found.nll.value == pytest.approx(-float(expected.mean()))
    assert sum(found.bins.count) == 4 and found.nll.low <= found.nll.value <= found.nll.high


def test_cells_are_answers_and_mosaics_are_resampled():
    # Twice one mosaic of four cells with the answers above: as many right and as sure, and two
    # mosaics that are alike leave nothing to vary.
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]]).double().log()
    labels = torch.tensor([0, 1, 1, 0]).expand(2, 4)
    task = Cells(classes=("a", "b"), grid=2)
    of_cells = module.prediction_quality(task, logits.flatten().expand(2, 8), labels)
    assert of_cells.score.value == 0.75 and sum(of_cells.bins.count) == 8
    expected = {"brier": 2.28 / 4, "ece": 0.4, "nll": -math.log(0.9 * 0.1 * 0.6 * 0.6) / 4}
    for name, value in expected.items():
        assert list(getattr(of_cells, name)) == pytest.approx([value] * 3)


def test_one_temperature_is_fitted_to_all_cells(tmp_path):
    spoken = {"source": {"kind": "digits"}, "form": "cells", "dialects": 2}
    Dialects(**spoken, train=50, validation=40, test=30).write(tmp_path)
    data = Prepared.open(tmp_path)
    torch.manual_seed(0)
    backbone = Vit(patch=8, width=16, depth=1, heads=2, pooling="mean")
    model = backbone.build(ImageSpec.from_card(data.card)).eval()
    files = module.CalibrationPaths("x", tmp_path, tmp_path, tmp_path / "out")
    result = calibrated(base.MeasuredModel(model, data), SETTINGS, files)
    logits, _ = predict_in_batches(model, data.validation.images, 16, routing=False)
    rows = torch.cat(list(logits.unflatten(1, (4, 10))))
    expected = Temperature().fit(rows, module.labels_as_tensor(data.validation.labels).flatten())
    assert result.find("temperature").value == expected.temperature != 1
    assert result.interval("score_before") == result.interval("score_after")
    assert result.interval("nll_after") != result.interval("nll_before")
    assert sum(result.facts["bins"]["after"]["count"]) == 4 * result.facts["test_images"] == 120


def test_the_test_split_before_and_after(made):
    subject, found, folder = made
    fitted = read_json_settings(folder / "out/calibrator.json", FittedTemperature, "a calibrator")
    temperature = found.find("temperature").value
    assert (temperature, found.facts["at_limit"]) == (fitted.temperature, fitted.at_limit)
    test = subject.data.test
    labels = module.labels_as_tensor(test.labels)
    logits, _ = predict_in_batches(subject.model, test.images, 16, routing=False)
    numbers = found.numbers()
    for when, said in (("before", logits), ("after", fitted.apply(logits))):
        hits = said.argmax(1) == labels
        expected = {
            "nll": float(class_task.class_nll(said, labels).mean()),
            "brier": float(class_task.brier_scores(said, labels).mean()),
            "ece": class_task.calibration_error(class_task.class_confidence(said), hits),
        }
        for name, value in expected.items():
            assert numbers[f"{name}_{when}"] == pytest.approx(value)
        bins = class_task.reliability_bins(class_task.class_confidence(said), hits)
        assert found.facts["bins"][when] == bins.model_dump(mode="json")
    assert found.interval("score_before") == found.interval("score_after")
    hits = CLASSES.decode_scores(found.facts["scores"], len(labels))
    assert torch.equal(hits, logits.argmax(1) == labels) and found.facts["test_images"] == 60


@pytest.mark.parametrize(
    ("kind", "task", "says"),
    [
        ("temperature", YEARS, "kind: found temperature; .* allowed: gap_on_age, linear"),
        ("linear", CLASSES, "kind: found linear; .* classification; allowed: temperature"),
        ("temperature", SETS, r"no calibrator .* multi_label .*leave pretrain out of run.phases"),
    ],
)
def test_a_calibrator_of_another_task_is_refused(kind, task, says):
    with pytest.raises(UserError, match=f"calibrate.*{says}"):
        calibrate = module.Calibrate(calibrator={"kind": kind})
        module.check_calibrator_fits_task(calibrate, task, "pretrain")


def test_the_stage_writes_what_was_measured(made, monkeypatch):
    folder = made[-1]
    in_run(monkeypatch, folder, calibrate=SETTINGS.model_dump(mode="json"))
    stage.calibrate("pretrain", "dense", 0)
    path = folder / "artifacts/measured/calibrate/pretrain/dense/0.json"
    temperature = base.read_result(path, values.Found, "calibrate").find("temperature").value
    path = folder / "artifacts/calibrate/pretrain/dense/0/calibrator.json"
    assert read_json_settings(path, FittedTemperature, "a calibrator").temperature == temperature
    path.write_text(path.read_text().replace(f"{temperature}", "9.25"))
    with pytest.raises(UserError, match="calibrator.json: damaged, its content is not what was"):
        read_json_settings(path, FittedTemperature, "a calibrator")


BIASED = """
from typing import ClassVar, Literal
from moecore.parts import Calibrator, FittedCalibrator

class FittedBiased(FittedCalibrator):
    kind: Literal["my_lab.biased"] = "my_lab.biased"
    bias: tuple[float, ...]

    def apply(self, predictions, groups=None):
        return predictions + predictions.new_tensor(self.bias)

class Biased(Calibrator):
    predicts: ClassVar = "classes"
    tasks: ClassVar = ("classification",)
    fitted: ClassVar = FittedBiased
    kind: Literal["my_lab.biased"] = "my_lab.biased"

    def fit(self, predictions, labels, groups=None):
        counts = labels.bincount(minlength=predictions.shape[1]) + 1.0
        bias = (counts / counts.sum()).log() - predictions.log_softmax(dim=1).mean(dim=0)
        return FittedBiased(bias=tuple(bias.tolist()))
"""


def test_a_calibrator_of_ones_own(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(write_my_lab(tmp_path, biased=BIASED).parent)])
    subject, _, folder = made
    with allowing_packages(["my_lab"]):
        own = module.Calibrate(calibrator={"kind": "my_lab.biased"}, batch=16)
        check_calibrator(own.calibrator)
        files = module.CalibrationPaths("x", folder, folder, tmp_path)
        result = calibrated(subject, own, files)
        assert result.find("temperature") is None
        assert result.interval("nll_after") != result.interval("nll_before")
        read = read_calibrator(tmp_path / "calibrator.json", "classes")
        assert (read.kind, len(read.bias), read.summary) == ("my_lab.biased", 10, "my_lab.biased")
        with pytest.raises(UserError, match="my_lab.biased, which calibrates classes; allowed"):
            read_calibrator(tmp_path / "calibrator.json", "numbers")
    forget_package()
    with pytest.raises(UserError, match="calibrator.json: kind: my_lab.biased is of a package"):
        read_calibrator(tmp_path / "calibrator.json", "classes")


def settings(**changes) -> cohort_checks.CohortChecks:
    small = {"subjects": 3, "ages": (20, 50, 80), "rescans": 4, "batch": 16}
    return cohort_checks.CohortChecks(**small | changes)


@pytest.fixture(scope="module")
def subject(cohort) -> base.MeasuredModel:
    torch.manual_seed(0)
    backbone = Vit3d(patch=8, width=8, depth=1, heads=1, mlp_ratio=1)
    return base.MeasuredModel(backbone.build(ImageSpec.from_card(cohort.card)).eval(), cohort)


@pytest.fixture(scope="module")
def found(subject) -> values.Found:
    assert cohort_checks.CohortChecks.applies(subject) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "RESCAN_YEARS", 200)
        return check_measurement(settings(), subject)


def test_a_real_cohort_whatever_the_batch(found, subject):
    assert found.find("monotone") is None
    assert "kind: phantom" in found.facts["not_checked"]["ageing"]
    assert all(found.find(f"isolated_{name}") for name in ("wm", "gm", "csf"))
    assert found.find("rescan").value > 0
    again = settings(batch=5).collect_result(subject, compute_without_cache)
    for name in ("isolated_wm", "isolated_gm", "isolated_csf"):
        assert again.find(name).value == pytest.approx(found.find(name).value, rel=1e-5)
    assert "no test participant has two sessions" in again.facts["not_checked"]["rescan"]


def drawn(
    n: int = 200, slope: float = 0.8, intercept: float = 11.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Predictions that lean towards the mean, the ages, and the sexes in turn."""
    generator = np.random.default_rng(seed)
    ages = generator.uniform(45, 90, n)
    return intercept + slope * ages + generator.normal(0, 3, n), ages, ["F", "M"] * (n // 2)


def slow(predictions, ages) -> tuple[float, float]:
    """(a, b) by the textbook's sums, one pair at a time."""
    n, sx, sy, sxx, sxy = len(ages), 0.0, 0.0, 0.0, 0.0
    for p, y in zip(predictions, ages, strict=True):
        sx, sy, sxx, sxy = sx + y, sy + p, sxx + y * y, sxy + y * p
    b = (n * sxy - sx * sy) / (n * sxx - sx * sx)
    return (sy - b * sx) / n, b


def fitted(predictions, ages, groups, **settings) -> FittedLinesByGroup:
    return Linear(**settings).fit(predictions, ages, groups)


def test_a_case_by_hand():
    # ages 0, 1, 2 and predictions 1, 2, 6: mean age 1, mean prediction 3, b = (−1·1 + 0·2 + 1·6) /
    # (1 + 0 + 1) = 2.5, a = 3 − 2.5 = 0.5.
    # Corrected: (1 − 0.5) / 2.5 = 0.2; (2 − 0.5) / 2.5 = 0.6; (6 − 0.5) / 2.5 = 2.2.
    found = fitted([1.0, 2.0, 6.0], [0.0, 1.0, 2.0], ["", "", ""])
    line = found.pooled
    assert (line.intercept, line.slope, line.n) == pytest.approx((0.5, 2.5, 3))
    assert found.groups == {} and found.apply([1.0, 2.0, 6.0]) == pytest.approx([0.2, 0.6, 2.2])


def test_table_s1_second_row_follows_from_its_first():
    # ŷ = 9.026 + 0.887·y on the test split (raw). With a = 5.08, b = 0.935 of the training split
    # the corrected prediction is
    # (ŷ − a)/b = (9.026 − 5.08)/0.935 + 0.887/0.935 · y = 4.220 + 0.9487·y; the paper prints 0.949
    # and 4.221.
    pooled = FittedLine(intercept=5.08, slope=0.935, n=100)
    line = FittedLinesByGroup(fit_on="train", pooled=pooled, groups={})
    predictions, ages, _ = drawn(slope=0.887, intercept=9.026)
    a, b = slow(predictions, ages)
    # least squares of this sample become exactly the paper's
    predictions += (9.026 - a) + (0.887 - b) * ages
    intercept, slope = slow(line.apply(predictions), ages)
    assert slope == pytest.approx(0.949, abs=5e-4) and intercept == pytest.approx(4.221, abs=2e-3)


def test_fits_per_sex_are_separate_pooled_fits():
    """They agree with the slow sums; a group that the fit lacks gets the pooled line."""
    predictions, ages, sexes = drawn()
    predictions[::2] += 4 - 0.1 * ages[::2]
    found = fitted(predictions, ages, sexes)
    line = (found.pooled.intercept, found.pooled.slope)
    assert line == pytest.approx(slow(predictions, ages), rel=1e-9)
    for sex, own in (("F", slice(0, None, 2)), ("M", slice(1, None, 2))):
        alone = fitted(predictions[own], ages[own], [""] * 100)
        assert found.groups[sex] == alone.pooled
        corrected = found.apply(predictions, sexes)[own]
        np.testing.assert_array_equal(corrected, alone.apply(predictions[own]))
    assert found.groups["F"].slope != pytest.approx(found.groups["M"].slope, abs=0.01)
    with pytest.warns(UserWarning, match="'', 'X'; the pooled line"):
        corrected = found.apply(predictions[:4], ["F", "X", "", "M"])
    pooled = found.apply(predictions[:4])
    assert corrected[1:3] == pytest.approx(pooled[1:3]) and corrected[0] != pooled[0]
    assert found.used(["F", "X", "", "M"]) == ["F", "pooled", "pooled", "M"]


@pytest.mark.parametrize(
    ("ages", "reason"),
    [
        ([50.0, 60.0], "found 2 pairs; allowed: 3"),
        ([50.0] * 4, "all 4 ages are 50"),
        ([50.0, 60, 70, 80], "slope of 0;"),
    ],
)
def test_a_group_that_is_too_poor_falls_back(ages, reason):
    predictions, known, sexes = drawn()
    with pytest.warns(UserWarning, match="'X' gets the pooled line"):
        poor = ([60.0] * len(ages), ages, ["X"] * len(ages))
        rows = zip((predictions, known, sexes), poor, strict=True)
        found = fitted(*([*rich, *added] for rich, added in rows))
    assert reason in found.fallbacks["X"] and set(found.groups) == {"F", "M"}
    assert found.pooled.n == 200 + len(ages)


@pytest.mark.parametrize(
    ("predictions", "ages", "groups", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], ["", ""], "found 2 pairs; allowed: 3 or more"),
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], [""] * 3, "1 of 3 predictions are NaN"),
        ([1.0, 1.05, 1.1], [1.0, 2.0, 3.0], [""] * 3, "slope of 0.05"),
    ],
)
def test_refusals(predictions, ages, groups, message):
    with pytest.raises(UserError, match=message):
        fitted(np.array(predictions, np.float64), np.array(ages, np.float64), groups)


def test_a_slope_at_the_floor_and_a_falling_one_are_taken():
    for slope in (0.5, -0.5):
        found = fitted([0, slope, 2 * slope], [0, 1, 2], [""] * 3, min_slope=0.5)
        assert found.pooled.slope == slope


def logits_of(images: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels are drawn from softmax(logits / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, 5, generator=generator)
    return logits * temperature, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def test_is_the_minimum_of_the_nll():
    logits, labels = logits_of(500, 3.0)
    fitted = Temperature().fit(logits, labels)
    nll = lambda temperature: float(cross_entropy(logits.double() / temperature, labels))
    best = nll(fitted.temperature)
    assert not fitted.at_limit
    assert all(best < nll(fitted.temperature * factor) for factor in (0.99, 1.01, 0.5, 2))


def test_a_temperature_by_hand_and_at_its_limits():
    # Logit gap 2, right in 3 of 4: the mean confidence is the accuracy where σ(2/T) = 3/4, so T = 2
    # / ln 3.
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert Temperature().fit(logits, labels).temperature == pytest.approx(2 / math.log(3), rel=1e-9)
    labels = torch.tensor([0, 1, 0, 1])
    right = torch.nn.functional.one_hot(labels, 2).float()
    for logits, limit in ((right, 0.05), (-right, 20), (torch.zeros(4, 2), 20)):
        expected = FittedTemperature(temperature=limit, at_limit=True)
        assert Temperature().fit(logits, labels) == expected


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.tensor([[float("nan"), 0], [0, 1]]), torch.tensor([0, 1]), "1 of 2"),
        (torch.zeros(2, 3), torch.tensor([1, 1]), "of class 1"),
    ],
)
def test_refuses_in_one_sentence(logits, labels, words):
    with pytest.raises(UserError, match=words):
        Temperature().fit(logits, labels)

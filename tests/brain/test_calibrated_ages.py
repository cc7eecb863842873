import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore.brain import age_correction, age_errors, age_predictions
from moecore.brain.age_calibration import write_calibration_folder
from moecore.brain.age_correction import CalibratorFit, ModelAges, conformal_radius, fit_calibrator
from moecore.brain.age_errors import measure_age_errors
from moecore.brain.age_predictions import read_predictions, write_predictions
from moecore.core.files import UserError, read_json
from moecore.measure.calibrators.linear import Linear
from moecore.statistics.intervals import Estimate
from tests.data.making import leaning, write_cohort

FILES = {"calibrator.json", "reference.json", "predictions.csv", "MODEL_CARD.md"}


@pytest.fixture(scope="module")
def ages(tmp_path_factory):
    root = tmp_path_factory.mktemp("ages")
    data = write_cohort(root / "data")
    (root / "model.safetensors").write_bytes(b"weights")
    return ModelAges.of(data, leaning(data), root / "model.safetensors")


@pytest.fixture(scope="module")
def line(ages):
    return fit_calibrator(ages, Linear(), None)


@pytest.fixture(scope="module")
def found(ages, line):
    return age_correction.summarize_age_errors(ages, line)


@pytest.fixture(scope="module")
def folder(ages, line, found, tmp_path_factory):
    target = tmp_path_factory.mktemp("written") / "calibrated"
    write_calibration_folder(target, ages, line, found, "pretrain/vmoe/0")
    return target


def test_the_line_is_that_of_the_training_split(ages, line):
    slope, intercept = np.polyfit(ages.known("train"), ages.predicted["train"], 1)
    assert line.fitted.pooled.slope == pytest.approx(slope)
    assert line.fitted.pooled.intercept == pytest.approx(intercept)
    assert (line.n, line.fitted.pooled.n, line.fitted.fit_on) == (60, 60, "train")
    assert line.fitted.predictor_sha256 == hashlib.sha256(b"weights").hexdigest()
    other = fit_calibrator(ages, Linear(fit_on="validation"), None)
    assert other.n == 24 and other.fitted.pooled.slope != line.fitted.pooled.slope


def test_table_s1(found, ages, line):
    raw = ages.predicted["test"] - ages.known("test")
    assert found.raw.mae.value == pytest.approx(np.abs(raw).mean())
    assert found.raw.slope.value == pytest.approx(0.7, abs=0.06) and found.raw.corr.value < -0.6
    # slope/b and (intercept − a)/b, as in table S1
    a, b = line.fitted.pooled.intercept, line.fitted.pooled.slope
    assert found.pooled.slope.value == pytest.approx(found.raw.slope.value / b)
    assert found.pooled.intercept.value == pytest.approx((found.raw.intercept.value - a) / b)
    assert abs(found.sex_specific.slope.value - 1) < 0.15
    assert found.pooled.mae.value < found.raw.mae.value
    for errors in (found.raw, found.pooled, found.sex_specific):
        for _, estimate in errors:
            assert estimate.low < estimate.value < estimate.high


def test_what_stands_beside_the_table(found, ages):
    known, training = ages.known("test"), ages.known("train")
    assert found.median_mae == pytest.approx(np.abs(known - np.median(training)).mean())
    assert found.age_range == (known.min(), known.max())
    assert (found.n_test, found.n_fit, found.kind, found.unit) == (40, 60, "linear", "years")
    assert found.simulated is True and found.refused is None
    sites = ["site0", "site1", "site2"]
    decades = [f"{decade}0–{decade}9" for decade in range(4, 9)]
    for name, groups in (("by_sex", ["", "F", "M"]), ("by_site", sites), ("by_decade", decades)):
        assert [row.group for row in getattr(found, name)] == groups
        assert sum(row.n for row in getattr(found, name)) == 40


def test_the_interval(found, ages, line):
    # 24 validation volumes of 23 participants (the first has two: only the first volume counts):
    # the ⌈24 · 0.9⌉ = 22nd smallest of 23.
    gaps = np.abs(line.fitted.apply(ages.predicted["validation"]) - ages.known("validation"))
    assert found.interval.radius == pytest.approx(np.sort(np.delete(gaps, 1))[21])
    assert found.interval.n == 23
    errors = np.abs(line.fitted.apply(ages.predicted["test"]) - ages.known("test"))
    assert found.interval.coverage.value == pytest.approx((errors <= found.interval.radius).mean())
    assert "also fitted" not in found.interval.method
    other = fit_calibrator(ages, Linear(fit_on="validation"), None)
    assert "also fitted" in age_correction.summarize_age_errors(ages, other).interval.method


def test_predictions_of_every_volume(folder, ages, line, found):
    assert {path.name for path in folder.iterdir()} == FILES
    rows = read_predictions(folder / "predictions.csv")
    assert tuple(rows[0]) == age_predictions.COLUMNS
    assert [row["split"] for row in rows] == ["train"] * 60 + ["validation"] * 24 + ["test"] * 40
    test, raw, known = rows[84:], ages.predicted["test"], ages.known("test")
    pooled = line.fitted.apply(raw)
    expected = {"age": known, "predicted_age": raw, "predicted_age_pooled": pooled}
    expected["predicted_age_sex_specific"] = line.fitted.apply(raw, ages.column("test", "sex"))
    expected |= {"brain_pad_raw": raw - known, "brain_pad_pooled": pooled - known}
    expected["interval_low"] = pooled - found.interval.radius
    expected["interval_high"] = pooled + found.interval.radius
    for name, values in expected.items():
        np.testing.assert_allclose([float(row[name]) for row in test], values, atol=6e-5)
    assert [row["calibration_group"] for row in test[-3:]] == ["M", "F", "pooled"]
    assert test[-1]["sex"] == ""
    assert (test[0]["participant_id"], test[1]["session_id"]) == ("sub-test001", "ses-1")
    assert (test[1]["participant_id"], test[2]["site"]) == ("sub-test001", "site2")


def test_the_reference_is_of_the_training_volumes(folder, ages):
    found = read_json(folder / "reference.json")
    means = [float(volume[volume > 0].astype(float).mean()) for volume in ages.data.train.images]
    spread = {"low": min(means), "high": max(means)}
    assert found["ranges"]["intensity_mean"] == pytest.approx(spread)
    assert set(found["ranges"]) == {"intensity_mean", "intensity_std", "brain_ml"}
    assert found["ranges"]["brain_ml"] == {"low": 27.0, "high": 27.0}  # 1000 voxels of 3 × 3 × 3 mm
    assert found["data"]["size"] == [16, 16, 16] and found["sites"] == ["site0", "site1", "site2"]
    flags = [row["qc_flags"] for row in read_predictions(folder / "predictions.csv")[:60]]
    assert not [flag for flag in flags if "outside training" in flag and "predicted" not in flag]


def test_the_card_says_simulated_and_what_it_is_not_for(folder, ages, line, found, tmp_path):
    text = (folder / "MODEL_CARD.md").read_text()
    assert "(SIMULATED data)" in text.splitlines()[0] and "no statement about people" in text
    assert "No diagnosis" in text and "biological age" in text
    assert f"{found.raw.mae.value:.3f}" in text and f"MAE of {found.median_mae:.2f} years" in text
    assert "train: 60 volumes (F 30, M 29, unknown 1)" in text
    weights = ages.data.folder.parent / "model.safetensors"
    real = ModelAges.of(write_cohort(tmp_path / "data", simulated=False), ages.predicted, weights)
    measured = age_correction.summarize_age_errors(real, line)
    write_calibration_folder(tmp_path / "out", real, line, measured, "pretrain/vmoe/0")
    text = (tmp_path / "out/MODEL_CARD.md").read_text()
    assert "SIMULATED" not in text and "scans of people" in text


def test_a_refused_fit_stops_or_is_reported(ages, tmp_path):
    predicted = {split: np.full(len(values), 60.0) for split, values in ages.predicted.items()}
    flat = ages._replace(predicted=predicted)
    with pytest.raises(UserError, match="slope of 0"):
        fit_calibrator(flat, Linear(), None)
    with pytest.warns(UserWarning, match="Nothing is corrected"):
        refused = fit_calibrator(flat, Linear(), None, "report")
    found = age_correction.summarize_age_errors(flat, refused)
    assert "slope of 0" in found.refused and found.pooled is None and found.sex_specific is None
    assert found.raw.slope.value == pytest.approx(0)
    write_calibration_folder(tmp_path / "out", flat, refused, found, "pretrain/vmoe/0")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"calibrator.json"}
    row = read_predictions(tmp_path / "out/predictions.csv")[-1]
    assert row["predicted_age_pooled"] == "" and row["calibration_group"] == "none"
    assert float(row["interval_high"]) > 60
    assert "No correction was fitted" in (tmp_path / "out/MODEL_CARD.md").read_text()


def test_out_of_fold_predictions_are_read(ages, tmp_path):
    subjects = ages.subjects["train"][::-1]
    raw = [30 + 0.5 * float(row["age"]) for row in subjects]
    said = age_predictions.correct_ages(raw, [], None)
    rows = age_predictions.prediction_rows(subjects, "train", said, None, [[]] * len(subjects))
    write_predictions(tmp_path / "predictions.csv", rows)
    found = fit_calibrator(ages, Linear(fit_on="out_of_fold"), tmp_path / "predictions.csv")
    assert found.fitted.pooled.slope == pytest.approx(0.5, abs=1e-5)
    assert found.fitted.pooled.intercept == pytest.approx(30, abs=1e-3)
    assert found.fitted.fit_on == "out_of_fold" and found.fitted.groups["F"].n == 30
    write_predictions(tmp_path / "predictions.csv", rows[1:])
    with pytest.raises(UserError, match="differ from the training split"):
        fit_calibrator(ages, Linear(fit_on="out_of_fold"), tmp_path / "predictions.csv")
    with pytest.raises(UserError, match="no such file"):
        fit_calibrator(ages, Linear(fit_on="out_of_fold"), tmp_path / "missing.csv")


def test_predictions_that_are_no_numbers_are_refused(ages, tmp_path):
    broken = {**ages.predicted, "test": np.array([np.nan, *ages.predicted["test"][1:]])}
    with pytest.raises(UserError, match="1 of 40 predictions of the split test are NaN"):
        ModelAges.of(ages.data, broken, tmp_path / "model.safetensors")


def test_too_few_validation_participants_have_no_interval(ages, line, tmp_path):
    one = ages.subjects["validation"][:1]
    few = ages._replace(subjects={**ages.subjects, "validation": one * 24})
    found = age_correction.summarize_age_errors(few, line)
    assert found.interval.radius is None and found.interval.coverage is None
    fit = CalibratorFit(line.fitted, None, 60, "train")
    write_calibration_folder(tmp_path / "out", few, fit, found, "x")
    assert read_predictions(tmp_path / "out/predictions.csv")[-1]["interval_low"] == ""
    assert "too few" in (tmp_path / "out/MODEL_CARD.md").read_text()


def drawn(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    generator = np.random.default_rng(seed)
    ages = generator.uniform(50, 90, n)
    return ages, 20 + 0.7 * ages + generator.normal(0, 3, n), [f"p{number}" for number in range(n)]


def test_a_case_by_hand():
    # ages 60, 70, 80; predictions 64, 69, 77: errors 4, −1, −3, so the MAE is 8/3.
    # slope: (−10·64 + 10·77) / 200 = 130/200 = 0.65; intercept: 70 − 0.65·70 = 24.5.
    # errors have mean 0; corr: (−10·4 + 10·−3) / √(200 · (16 + 1 + 9)) = −70/√5200.
    ages, predicted = np.array([60.0, 70, 80]), np.array([64.0, 69, 77])
    found = measure_age_errors(ages, {"raw": predicted}, ["a", "b", "c"])["raw"]
    assert found.mae.value == pytest.approx(8 / 3) and found.slope.value == pytest.approx(0.65)
    assert found.intercept.value == pytest.approx(24.5)
    assert found.corr.value == pytest.approx(-70 / np.sqrt(5200))


@given(st.integers(0, 500))
def test_a_weight_is_a_volume_taken_as_often(seed):
    generator = np.random.default_rng(seed)
    ages, predictions, _ = drawn(8, seed)
    weights = generator.multinomial(8, np.full(8, 1 / 8), size=1).astype(float)
    taken = np.repeat(np.arange(8), weights[0].astype(int))
    y, p = ages[taken], predictions[taken]
    if len(set(y)) < 3:
        return
    resampled = age_errors.age_errors_by_resample(predictions, ages, weights)
    found = {name: value[0] for name, value in resampled.items()}
    slope, intercept = np.polyfit(y, p, 1)
    assert found["slope"] == pytest.approx(slope, rel=1e-6)
    assert found["intercept"] == pytest.approx(intercept, rel=1e-6, abs=1e-5)
    assert found["mae"] == pytest.approx(np.abs(p - y).mean())
    assert found["corr"] == pytest.approx(np.corrcoef(p - y, y)[0, 1], abs=1e-7)


def test_intervals_hold_the_value_and_are_of_the_right_width():
    # The mean of 400 |errors| with standard deviation s has a 95 % interval of about ± 1.96·s/√400.
    ages, predictions, people = drawn(400)
    found = measure_age_errors(ages, {"raw": predictions}, people)["raw"]
    spread = np.abs(predictions - ages).std() / 20 * 1.96
    assert found.mae.value - found.mae.low == pytest.approx(spread, rel=0.12)
    assert found.mae.high - found.mae.value == pytest.approx(spread, rel=0.12)
    assert all(interval.low < interval.value < interval.high for _, interval in found)
    assert found.corr.low >= -1


def test_limits_are_reflected():
    # One error of 20 among 30 of 1: resamples are skewed to the right, so the reflected interval
    # reaches further down than up.
    ages, people = np.linspace(50, 80, 30), [str(number) for number in range(30)]
    predicted = ages + np.where(np.arange(30) == 7, 20.0, 1.0)
    found = measure_age_errors(ages, {"raw": predicted}, people)["raw"].mae
    assert found.value - found.low > 1.3 * (found.high - found.value)


def test_participants_not_sessions_are_resampled_and_alike_for_all_variants():
    # Four copies of each volume under the same participant add nothing: the interval is that of the
    # volumes once, not half as wide.
    ages, predictions, people = drawn()
    once = measure_age_errors(ages, {"raw": predictions}, people)["raw"]
    four = measure_age_errors(np.tile(ages, 4), {"raw": np.tile(predictions, 4)}, people * 4)["raw"]
    for name, estimate in once:
        assert getattr(four, name).model_dump() == pytest.approx(estimate.model_dump())
    weights = age_errors.draw_resample_weights(["a", "b", "a", "c"], 50)
    assert (weights[:, 0] == weights[:, 2]).all() and (weights[:, [0, 1, 3]].sum(1) == 3).all()
    assert len(np.unique(weights[:, 0])) > 1
    variants = {"raw": predictions, "same": predictions, "moved": predictions + 5}
    found = measure_age_errors(ages, variants, people)
    assert found["raw"] == found["same"]
    assert found["moved"].slope.model_dump() == pytest.approx(found["raw"].slope.model_dump())
    assert found["moved"].intercept.value == pytest.approx(found["raw"].intercept.value + 5)


def test_errors_by_group():
    # F: errors 2, −4 → MAE 3; M: one participant with errors 1 and 3 → MAE 2, no limits.
    ages, predicted = np.array([60.0, 60, 70, 80]), np.array([62.0, 61, 66, 83])
    rows = age_errors.measure_group_errors("FMFM", ages, {"raw": predicted}, list("abcb"))
    assert [(row.group, row.n) for row in rows] == [("F", 2), ("M", 2)]
    assert rows[0].raw.mae.value == 3 and rows[0].raw.mae.low is not None
    assert rows[1].raw.mae == Estimate(value=2.0)


def test_the_radius_by_hand():
    # n = 9: the ⌈10 · 0.9⌉ = 9th smallest of |residuals| is the largest; n = 19: the 18th of 19; n
    # = 8 has no 9th.
    assert conformal_radius(np.array([1, -9, 3, 4, 5, 6, 7, 8, 2.0]), 0.9) == 9
    assert conformal_radius(np.arange(1.0, 20), 0.9) == 18
    assert conformal_radius(np.ones(8), 0.9) is None
    assert conformal_radius(np.arange(1.0, 5), 0.5) == 3 and conformal_radius([], 0.9) is None

"""Ages from predictions to files: what is measured, what predictions.csv holds, what the card
says.
"""

import hashlib

import numpy as np
import pytest

from moecore.brain.ages import Ages, Fit, fit
from moecore.brain.calibrated_ages import write
from moecore.brain.measured_ages import Result, measured
from moecore.brain.prediction_table import (
    COLUMNS,
    corrected,
    prediction_rows,
    read_predictions,
    write_predictions,
)
from moecore.brain.reference import QUANTITIES
from moecore.core.files import UserError, read_json
from moecore.measure.calibrators.linear import FittedLinear, Linear
from tests.volumes import leaning, write_cohort

FILES = {"calibrator.json", "reference.json", "predictions.csv", "MODEL_CARD.md"}


@pytest.fixture(scope="module")
def ages(tmp_path_factory):
    root = tmp_path_factory.mktemp("ages")
    data = write_cohort(root / "data")
    (root / "model.safetensors").write_bytes(b"weights")
    return Ages.of(data, leaning(data), root / "model.safetensors")


@pytest.fixture(scope="module")
def line(ages):
    return fit(ages, Linear(), None)


@pytest.fixture(scope="module")
def found(ages, line):
    return measured(ages, line, "train", 300)


@pytest.fixture(scope="module")
def folder(ages, line, found, tmp_path_factory):
    target = tmp_path_factory.mktemp("written") / "calibrated"
    write(target, ages, line, found, "pretrain/vmoe/0")
    return target


def test_the_line_is_that_of_the_training_split(ages, line):
    slope, intercept = np.polyfit(ages.known("train"), ages.predicted["train"], 1)
    assert line.fitted.pooled.slope == pytest.approx(
        slope
    ) and line.fitted.pooled.intercept == pytest.approx(intercept)
    assert (line.n, line.fitted.pooled.n, line.fitted.fit_on) == (60, 60, "train")
    assert line.fitted.predictor_sha256 == hashlib.sha256(b"weights").hexdigest()
    other = fit(ages, Linear(fit_on="validation"), None)
    assert other.n == 24 and other.fitted.pooled.slope != line.fitted.pooled.slope


def test_table_s1(found, ages, line):
    raw = ages.predicted["test"] - ages.known("test")
    assert found.raw.mae.value == pytest.approx(np.abs(raw).mean())
    assert found.raw.slope.value == pytest.approx(0.7, abs=0.06) and found.raw.corr.value < -0.6
    # slope/b and (intercept − a)/b, as in table S1
    a, b = line.fitted.pooled.intercept, line.fitted.pooled.slope
    assert found.pooled.slope.value == pytest.approx(found.raw.slope.value / b)
    assert found.pooled.intercept.value == pytest.approx((found.raw.intercept.value - a) / b)
    assert (
        abs(found.sex_specific.slope.value - 1) < 0.15
        and found.pooled.mae.value < found.raw.mae.value
    )
    for errors in (found.raw, found.pooled, found.sex_specific):
        for _, estimate in errors:
            assert estimate.low < estimate.value < estimate.high


def test_what_stands_beside_the_table(found, ages):
    known, training = ages.known("test"), ages.known("train")
    assert found.median_mae == pytest.approx(
        np.abs(known - np.median(training)).mean()
    ) and found.age_range == (known.min(), known.max())
    assert (
        found.n_test,
        found.n_test_participants,
        found.n_fit,
        found.kind,
        found.unit,
    ) == (40, 39, 60, "linear", "years")
    assert found.simulated is True and found.data == "small cohort" and found.refused is None
    for name, groups in (
        ("by_sex", ["", "F", "M"]),
        ("by_site", ["site0", "site1", "site2"]),
        ("by_decade", ["40–49", "50–59", "60–69", "70–79", "80–89"]),
    ):
        assert [row.group for row in getattr(found, name)] == groups and sum(
            row.n for row in getattr(found, name)
        ) == 40
    assert (
        found.calibration_groups == {"F": 20, "M": 19, "pooled": 1}
        and list(found.calibration_groups)[-1] == "pooled"
    )
    assert Result.model_validate_json(found.model_dump_json()) == found


def test_the_interval(found, ages, line):
    # 24 validation volumes of 23 participants (the first has two: only the first volume counts):
    # the ⌈24 · 0.9⌉ = 22nd smallest of 23.
    gaps = np.abs(line.fitted.apply(ages.predicted["validation"]) - ages.known("validation"))
    assert (
        found.interval.radius == pytest.approx(np.sort(np.delete(gaps, 1))[21])
        and found.interval.n == 23
    )
    inside = (
        np.abs(line.fitted.apply(ages.predicted["test"]) - ages.known("test"))
        <= found.interval.radius
    )
    assert (
        found.interval.coverage.value == pytest.approx(inside.mean())
        and "also fitted" not in found.interval.method
    )
    other = fit(ages, Linear(fit_on="validation"), None)
    assert "also fitted" in measured(ages, other, "validation", 100).interval.method


def test_predictions_of_every_volume(folder, ages, line, found):
    assert {path.name for path in folder.iterdir()} == FILES
    rows = read_predictions(folder / "predictions.csv")
    assert (
        tuple(rows[0]) == COLUMNS
        and [row["split"] for row in rows] == ["train"] * 60 + ["validation"] * 24 + ["test"] * 40
    )
    test = rows[84:]
    for name, expected in (
        ("age", ages.known("test")),
        ("predicted_age", ages.predicted["test"]),
        ("predicted_age_pooled", line.fitted.apply(ages.predicted["test"])),
        (
            "predicted_age_sex_specific",
            line.fitted.apply(ages.predicted["test"], ages.column("test", "sex")),
        ),
        ("brain_pad_raw", ages.predicted["test"] - ages.known("test")),
        ("brain_pad_pooled", line.fitted.apply(ages.predicted["test"]) - ages.known("test")),
        ("interval_low", line.fitted.apply(ages.predicted["test"]) - found.interval.radius),
        ("interval_high", line.fitted.apply(ages.predicted["test"]) + found.interval.radius),
    ):
        np.testing.assert_allclose([float(row[name]) for row in test], expected, atol=6e-5)
    assert [row["calibration_group"] for row in test[-3:]] == ["M", "F", "pooled"] and test[-1][
        "sex"
    ] == ""
    assert (
        test[0]["participant_id"],
        test[1]["participant_id"],
        test[1]["session_id"],
        test[2]["site"],
    ) == ("sub-test001", "sub-test001", "ses-1", "site2")


def test_the_reference_is_of_the_training_volumes(folder, ages):
    found = read_json(folder / "reference.json")
    means = [float(volume[volume > 0].astype(float).mean()) for volume in ages.data.train.images]
    assert found["ranges"]["intensity_mean"] == pytest.approx(
        {"low": min(means), "high": max(means)}
    ) and set(found["ranges"]) == set(QUANTITIES)
    assert found["ranges"]["brain_ml"] == {"low": 27.0, "high": 27.0}  # 1000 voxels of 3 × 3 × 3 mm
    assert (
        found["volumes"] == 60
        and found["data"]["size"] == [16, 16, 16]
        and found["sites"] == ["site0", "site1", "site2"]
    )
    training = read_predictions(folder / "predictions.csv")[:60]
    assert not [
        row
        for row in training
        if "outside training" in row["qc_flags"] and "predicted" not in row["qc_flags"]
    ]


def test_the_card_says_simulated_and_what_it_is_not_for(folder, ages, line, found, tmp_path):
    text = (folder / "MODEL_CARD.md").read_text()
    assert (
        "(SIMULATED data)" in text.splitlines()[0]
        and "no statement about people" in text
        and "No diagnosis" in text
        and "biological age" in text
    )
    assert (
        f"{found.raw.mae.value:.3f}" in text
        and f"MAE of {found.median_mae:.2f} years" in text
        and "train: 60 volumes (F 30, M 29, unknown 1)" in text
    )
    real = Ages.of(
        write_cohort(tmp_path / "data", simulated=False),
        ages.predicted,
        ages.data.folder.parent / "model.safetensors",
    )
    write(tmp_path / "out", real, line, measured(real, line, "train", 100), "pretrain/vmoe/0")
    text = (tmp_path / "out/MODEL_CARD.md").read_text()
    assert "SIMULATED" not in text and "scans of people" in text


def test_a_refused_fit_stops_or_is_reported(ages, tmp_path):
    flat = ages._replace(
        predicted={split: np.full(len(values), 60.0) for split, values in ages.predicted.items()}
    )
    with pytest.raises(UserError, match="slope of 0"):
        fit(flat, Linear(), None)
    with pytest.warns(UserWarning, match="Nothing is corrected"):
        refused = fit(flat, Linear(), None, "report")
    found = measured(flat, refused, "train", 100)
    assert (
        "slope of 0" in found.refused
        and found.pooled is None
        and found.sex_specific is None
        and found.raw.slope.value == pytest.approx(0)
    )
    write(tmp_path / "out", flat, refused, found, "pretrain/vmoe/0")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"calibrator.json"}
    row = read_predictions(tmp_path / "out/predictions.csv")[-1]
    assert (
        row["predicted_age_pooled"] == ""
        and row["calibration_group"] == "none"
        and float(row["interval_high"]) > 60
    )
    assert "No correction was fitted" in (tmp_path / "out/MODEL_CARD.md").read_text()


def test_out_of_fold_predictions_are_read(ages, tmp_path):
    subjects = ages.subjects["train"][::-1]
    said = corrected([30 + 0.5 * float(row["age"]) for row in subjects], [], None)
    rows = prediction_rows(subjects, "train", said, None, [[]] * len(subjects))
    write_predictions(tmp_path / "predictions.csv", rows)
    found = fit(ages, Linear(fit_on="out_of_fold"), tmp_path / "predictions.csv")
    assert found.fitted.pooled.slope == pytest.approx(
        0.5, abs=1e-5
    ) and found.fitted.pooled.intercept == pytest.approx(30, abs=1e-3)
    assert found.fitted.fit_on == "out_of_fold" and found.fitted.groups["F"].n == 30
    write_predictions(tmp_path / "predictions.csv", rows[1:])
    with pytest.raises(UserError, match="not those of the training split"):
        fit(ages, Linear(fit_on="out_of_fold"), tmp_path / "predictions.csv")
    with pytest.raises(UserError, match="no such file"):
        fit(ages, Linear(fit_on="out_of_fold"), tmp_path / "missing.csv")


def test_predictions_that_are_no_numbers_are_refused(ages, tmp_path):
    (tmp_path / "w").write_bytes(b"")
    with pytest.raises(UserError, match="1 of 40 predictions of the split test are NaN"):
        Ages.of(
            ages.data,
            {**ages.predicted, "test": np.array([np.nan, *ages.predicted["test"][1:]])},
            tmp_path / "w",
        )


def test_too_few_validation_participants_have_no_interval(ages, line, tmp_path):
    few = ages._replace(
        subjects={**ages.subjects, "validation": ages.subjects["validation"][:1] * 24}
    )
    found = measured(few, line, "train", 100)
    assert found.interval.radius is None and found.interval.coverage is None
    write(tmp_path / "out", few, Fit(line.fitted, None, 60), found, "x")
    assert (
        read_predictions(tmp_path / "out/predictions.csv")[-1]["interval_low"] == ""
        and "too few" in (tmp_path / "out/MODEL_CARD.md").read_text()
    )


def test_the_calibrator_on_disk_is_the_fitted_one(folder, line):
    assert FittedLinear.from_json((folder / "calibrator.json").read_text()) == line.fitted

"""The gap between predicted and known age: corrected by the known age, and against diagnoses."""

import numpy as np
import pytest

from moecore.brain.age_calibration import write_calibration_folder
from moecore.brain.age_errors import GapRows, measure_diagnosis_gaps
from moecore.brain.age_measurement import AgeResult, Ages, fit_age_line, summarize_age_errors
from moecore.brain.prediction_table import correct_ages, prediction_rows, read_predictions
from moecore.core.files import UserError
from moecore.measure.calibrators.gap_on_age import GapOnAge
from moecore.measure.calibrators.linear import Linear
from moecore.report.column import Column
from moecore.report.measures.ages import COLUMNS
from tests.volumes import leaning, write_cohort

AGES = np.array([50.0, 60, 70])
SAID = np.array([55.0, 60, 65])  # gaps 5, 0, −5: g(y) = 30 − y/2, and ŷ = 30 + y/2


@pytest.fixture(scope="module")
def ages(tmp_path_factory):
    root = tmp_path_factory.mktemp("gaps")
    (root / "model.safetensors").write_bytes(b"weights")
    data = write_cohort(root / "data")
    return Ages.of(data, leaning(data), root / "model.safetensors")


def test_a_line_by_hand_and_beside_the_other_correction():
    fitted = GapOnAge().fit(SAID, AGES)
    assert fitted.pooled.coefficients == pytest.approx((30, -0.5))
    # A person of 80 who is said to be 75: −5, where −10 is expected, so 5 more than others of 80.
    # By the other correction (75 − 30) / 0.5 = 90, a gap of 10 = 5 / b with the slope b = 0.5.
    new = np.array([75.0]), None
    assert fitted.apply(*new, np.array([80.0])) - 80 == pytest.approx(5)
    assert Linear().fit(SAID, AGES).apply(*new) - 80 == pytest.approx(10)


def test_a_parabola_and_a_curve_per_sex():
    ages = np.linspace(40, 80, 12)
    sexes = ["F", "M"] * 6
    gaps = np.where(np.array(sexes) == "F", 0.01 * (ages - 60) ** 2 - 1, 2)
    fitted = GapOnAge(degree=2).fit(ages + gaps, ages, sexes)
    assert fitted.groups["F"].coefficients == pytest.approx((35, -1.2, 0.01))
    assert fitted.apply(ages + gaps, sexes, ages) == pytest.approx(ages)
    line = GapOnAge(degree=1).fit(ages + gaps, ages, sexes)
    assert np.abs(line.apply(ages + gaps, sexes, ages) - ages).max() > 1
    with pytest.warns(UserWarning, match="'M' gets the pooled line: found 3 pairs; allowed: 4"):
        few = GapOnAge(degree=2).fit(ages + gaps, ages, ["F"] * 9 + ["M"] * 3)
    assert few.used(["F", "M"]) == ["F", "pooled"]


def test_without_the_age_it_is_refused():
    fitted = GapOnAge().fit(SAID, AGES)
    with pytest.raises(UserError, match="corrects by the known age, .* allowed: .* kind: linear"):
        fitted.apply(SAID)
    with pytest.raises(UserError, match="1 of 3 ages are NaN"):
        fitted.apply(SAID, None, np.array([50, np.nan, 70]))
    with pytest.raises(UserError, match="gap_on_age, fitted on train.*: all 3 ages are 50"):
        GapOnAge().fit(SAID, AGES * 0 + 50)


def test_who_has_no_age_keeps_the_prediction_alone():
    subjects = [
        {"participant_id": name, "session_id": "", "sex": "F", "site": "", "age": age}
        for name, age in (("a", "80"), ("b", ""))
    ]
    fitted = GapOnAge().fit(SAID, AGES, ["F"] * 3)
    said = correct_ages(np.array([75.0, 75]), ["F", "F"], fitted, np.array([80, np.nan]))
    known, unknown = prediction_rows(subjects, "new", said, 4.0, [[], []])
    assert known.brain_pad_pooled == pytest.approx(5) and known.calibration_group == "F"
    assert unknown.predicted_age == 75 and unknown.predicted_age_pooled is None
    assert unknown.calibration_group == "none" and "the age, which is unknown" in unknown.qc_flags
    assert (known.interval_low, known.interval_high) == (71, 79)  # around what is predicted


def test_what_the_age_went_into_has_no_error(ages, tmp_path):
    line = fit_age_line(ages, GapOnAge(fit_on="validation"), None)
    measured = summarize_age_errors(ages, line)
    assert AgeResult.model_validate_json(measured.model_dump_json()) == measured
    assert measured.kind == "gap_on_age" and measured.uses_age and measured.pooled.mae is None
    assert measured.raw.corr.value < -0.6 and abs(measured.pooled.corr.value) < 0.3
    assert set(measured.items) == {"raw"} and all(row.pooled is None for row in measured.by_sex)
    column = {one.name: one for one in COLUMNS if isinstance(one, Column)}
    assert column["mae_pooled"].read(measured) is None
    assert column["corr_size_raw"].read(measured) == -measured.raw.corr.value
    write_calibration_folder(tmp_path / "out", ages, line, measured, "pretrain/vmoe/0")
    assert "predicts nobody's age" in (tmp_path / "out/MODEL_CARD.md").read_text()
    assert read_predictions(tmp_path / "out/predictions.csv")[-1]["brain_pad_pooled"]


def rows(ages, gaps, sexes, diagnoses):
    people = [f"p{number}" for number in range(len(ages))]
    return GapRows(np.array(gaps, float), np.array(ages, float), sexes, diagnoses, people)


def test_gaps_of_a_diagnosis_by_hand():
    # AD: gaps 4, 6; CN: 1, 3, 5. Means 5 and 3. Of six pairs AD is the larger in 5: (4 > 1, 3;
    # 6 > 1, 3, 5) — 5/6.
    given = rows([70] * 5, [4, 6, 1, 3, 5], "FMFMF", ["AD", "AD", "CN", "CN", "CN"])
    (one,) = measure_diagnosis_gaps(given, ["CN", "CN", "AD"], corrected=True)
    assert (one.diagnosis, one.reference, one.n, one.n_reference) == ("AD", "CN", 2, 3)
    assert one.difference.value == pytest.approx(2) and one.auc.value == pytest.approx(5 / 6)
    assert one.difference.low < 2 < one.difference.high and one.auc.high <= 1


def test_a_difference_that_is_one_of_age_goes_at_equal_age():
    random = np.random.default_rng(0)
    ages = np.concatenate([random.uniform(70, 90, 60), random.uniform(50, 80, 90)])
    sexes = list("FM" * 75)
    gaps = -0.3 * (ages - 70) + np.where(np.array(sexes) == "F", 2, 0) + random.normal(0, 1, 150)
    given = rows(ages, gaps, sexes, ["AD"] * 60 + ["CN"] * 90)
    (one,) = measure_diagnosis_gaps(given, ["CN"], corrected=False)
    assert one.difference.high < -3 and one.adjusted.low < 0 < one.adjusted.high
    design = np.column_stack([np.ones(150), np.arange(150) < 60, ages, [s == "F" for s in sexes]])
    slope = np.linalg.lstsq(design.astype(float), gaps, rcond=None)[0][1]
    assert one.adjusted.value == pytest.approx(slope)


def test_whom_nothing_can_be_said_of():
    given = rows([70, 71, 72], [1, 2, 3], "FMF", ["AD", "CN", "CN"])
    assert measure_diagnosis_gaps(given, ["CN"], True) == ()  # one person with AD
    assert measure_diagnosis_gaps(given, [""], True) == ()  # no diagnosis in training

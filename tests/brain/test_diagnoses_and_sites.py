import numpy as np
import pytest
from pydantic import ValidationError

from moecore import Prepared, UserError
from moecore.brain import tissue_ridge
from moecore.brain.age_calibration import write_calibration_folder
from moecore.brain.age_correction import METRICS, ModelAges, fit_calibrator, summarize_age_errors
from moecore.brain.age_errors import AgeGaps, measure_diagnosis_gaps
from moecore.brain.age_predictions import correct_ages, prediction_rows, read_predictions
from moecore.calibrators import GapOnAge, Linear
from moecore.data.layouts.volumes import VolumeSplitToWrite, write_volumes
from moecore.data.volumes.participants import VolumeSubject, age_cohort_card
from moecore.data.volumes.volume_preparation import TISSUES
from moecore.measure.calibration import TissueVolumeRidgeSettings
from moecore.measure.values import Values
from tests.data.making import Balls, ball, balls, leaning, write_cohort
from tests.measure.subjects import compute_without_cache

AGES = np.array([50.0, 60, 70])
SAID = np.array([55.0, 60, 65])  # gaps 5, 0, −5: g(y) = 30 − y/2, and ŷ = 30 + y/2
ADDED = {"a": (0.0, 0.0, 0.0), "b": (40.0, -30.0, 20.0), "c": (-25.0, 60.0, 10.0)}
STRETCH = {"a": 1.0, "b": 2.0, "c": 0.5}


@pytest.fixture(scope="module")
def ages(tmp_path_factory):
    root = tmp_path_factory.mktemp("gaps")
    (root / "model.safetensors").write_bytes(b"weights")
    data = write_cohort(root / "data")
    return ModelAges.of(data, leaning(data), root / "model.safetensors")


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
    row = {"participant_id": "a", "session_id": "", "sex": "F", "site": "", "age": "80"}
    subjects = [row, row | {"participant_id": "b", "age": ""}]
    fitted = GapOnAge().fit(SAID, AGES, ["F"] * 3)
    said = correct_ages(np.array([75.0, 75]), ["F", "F"], fitted, np.array([80, np.nan]))
    known, unknown = prediction_rows(subjects, "new", said, 4.0, [[], []])
    assert known.brain_pad_pooled == pytest.approx(5) and known.calibration_group == "F"
    assert unknown.predicted_age == 75 and unknown.predicted_age_pooled is None
    assert unknown.calibration_group == "none" and "the age, which is unknown" in unknown.qc_flags
    assert (known.interval_low, known.interval_high) == (71, 79)  # around what is predicted


def test_what_the_age_went_into_has_no_error(ages, tmp_path):
    line = fit_calibrator(ages, GapOnAge(fit_on="validation"), None)
    measured = summarize_age_errors(ages, line)
    assert measured.kind == "gap_on_age" and measured.uses_age and measured.pooled.mae is None
    assert measured.raw.corr.value < -0.6 and abs(measured.pooled.corr.value) < 0.3
    assert set(measured.absolute) == {"raw"} and all(row.pooled is None for row in measured.by_sex)
    out = Values(METRICS, ages.data.task, compute_without_cache)
    measured.put_metrics(out)
    found = out.found()
    assert found.find("mae_pooled") is None
    for value in (found.find("mae_raw"), found.find("mae_of_median")):
        assert value.value == pytest.approx(np.mean(value.item_values), rel=1e-3)
    assert found.find("mae_of_median").value == measured.raw.mae.value / measured.median_mae
    assert found.find("corr_size_raw").value == -measured.raw.corr.value
    write_calibration_folder(tmp_path / "out", ages, line, measured, "pretrain/vmoe/0")
    assert "does not predict ages" in (tmp_path / "out/MODEL_CARD.md").read_text()
    assert read_predictions(tmp_path / "out/predictions.csv")[-1]["brain_pad_pooled"]


def rows(ages, gaps, sexes, diagnoses):
    people = [f"p{number}" for number in range(len(ages))]
    return AgeGaps(np.array(gaps, float), np.array(ages, float), sexes, diagnoses, people)


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


def scanned(n, sites, seed=0):
    """Features (n, 3) that age moves, at sites that add and stretch; ages (n, 1), and the sites."""
    random = np.random.default_rng(seed)
    ages = random.uniform(20, 90, (n, 1))
    names = [sites[i % len(sites)] for i in range(n)]
    noise = random.normal(0, 5, (n, 3)) * np.array([STRETCH[name] for name in names])[:, None]
    added = np.array([ADDED[name] for name in names])
    return 500 + ages * np.array([[-2.0, -1.0, 1.5]]) + added + noise, ages, names


def test_what_sites_add_and_stretch_is_found():
    features, ages, sites = scanned(600, "abc")
    fitted = tissue_ridge.SiteHarmonisation.fit(features, ages, sites)
    assert fitted.slopes[0] == pytest.approx([-2, -1, 1.5], abs=0.06)
    shifts = {name: fitted.deviation * fitted.effects[name].location for name in "abc"}
    for name in "bc":
        assert shifts[name] - shifts["a"] == pytest.approx(ADDED[name], abs=2)
    scales = {name: fitted.effects[name].scale.mean() for name in "abc"}
    assert scales["b"] / scales["c"] == pytest.approx(4, rel=0.15)
    # without ages sites are moved alone; with them they also get one spread
    moved = fitted.harmonise(features, sites)
    assert moved == pytest.approx(features - np.stack([shifts[name] for name in sites]))
    whole = fitted.harmonise(features, sites, ages) - ages @ fitted.slopes
    spread = [whole[np.array(sites) == name].std(axis=0) for name in "abc"]
    assert np.ptp(spread, axis=0) == pytest.approx([0, 0, 0], abs=0.5)


def test_the_shrinkage_solves_both_equations():
    residuals = np.random.default_rng(1).normal([0.5, -0.2, 0.1], [1.0, 2.0, 0.5], (12, 3))
    effect = tissue_ridge.shrink_site_effect(residuals)
    mean, variance = residuals.mean(0), residuals.var(0, ddof=1)
    tau, m, s = mean.var(ddof=1), variance.mean(), variance.var(ddof=1)
    lam, theta = m**2 / s + 2, m**3 / s + m  # mean θ/(λ−1) = m, variance m²/(λ−2) = s
    assert theta / (lam - 1) == pytest.approx(m) and m**2 / (lam - 2) == pytest.approx(s)
    squared, n = effect.scale**2, len(residuals)
    location = (n * tau * mean + squared * mean.mean()) / (n * tau + squared)
    assert effect.location == pytest.approx(location)
    sums = ((residuals - effect.location) ** 2).sum(0)
    assert squared == pytest.approx((theta + sums / 2) / (n / 2 + lam - 1))
    # each lies between the site's own mean and that of its features
    assert (np.abs(effect.location - mean.mean()) < np.abs(mean - mean.mean())).all()


def test_a_site_that_training_lacks_needs_a_declared_part():
    features, ages, sites = scanned(300, "ab")
    fitted = tissue_ridge.SiteHarmonisation.fit(features, ages, sites)
    new, new_ages, names = scanned(60, "c", seed=5)
    with pytest.raises(UserError, match=r"people at 'c'; allowed: a, b, or a declared reference"):
        fitted.harmonise(new, names)
    placed = fitted.with_site("c", new[:20], new_ages[:20])
    left = placed.harmonise(new[20:], names[20:]) - new_ages[20:] @ placed.slopes
    assert left.mean(0) == pytest.approx(placed.mean, abs=3)
    assert placed.effects["a"] is fitted.effects["a"]  # nothing else moves
    with pytest.raises(UserError, match="found 2 people in the reference part of the site c"):
        fitted.with_site("c", new[:2], new_ages[:2])
    with pytest.raises(UserError, match="found the sites a; allowed: 2 or more"):
        tissue_ridge.SiteHarmonisation.fit(features, ages, ["a"] * 300)


def write_sites(folder):
    """Balls whose fluid grows with age, at two sites in training and a third in the test."""
    parts = {}
    for number, (split, sites) in enumerate((("train", "ab"), ("validation", "a"), ("test", "c"))):
        ages = np.linspace(25, 85, 24)
        rows = [
            VolumeSubject(f"sub-{split}{i:02}", "", float(age), "FM"[i % 2], sites[i % len(sites)])
            for i, age in enumerate(ages)
        ]
        made = [ball(age, 100 * number + i) for i, age in enumerate(ages)]
        parts[split] = VolumeSplitToWrite(rows, made)
    card = age_cohort_card("balls", (16, 16, 16), 10.0, TISSUES, ("none", "made"))
    write_volumes(folder, Balls(), card, parts)
    return Prepared.open(folder)


def test_ridge_on_tissue_volumes(tmp_path):
    data = balls(tmp_path / "data")
    volumes = tissue_ridge.read_tissue_volumes(data, "test")
    shares = data.regions("test")[3].astype(float) / 255
    assert volumes.features[3] == pytest.approx(shares.sum((1, 2, 3)) / 1000)  # voxels of 1 mm³
    ridge = tissue_ridge.measure_tissue_ridge(data, TissueVolumeRidgeSettings())
    ages = data.test.labels
    assert ridge.errors.mae.value < 0.3 * np.abs(ages - np.median(data.train.labels)).mean()
    assert ridge.n_test == len(ages) == len(ridge.absolute) and ridge.reference == {}
    with pytest.raises(UserError, match="this data has no tissue maps"):
        tissue_ridge.measure_tissue_ridge(
            balls(tmp_path / "none", regions=False), TissueVolumeRidgeSettings()
        )


def test_ridge_where_the_test_is_another_site(tmp_path):
    data = write_sites(tmp_path / "data")
    with pytest.raises(UserError, match="found no training people at 'c'"):
        tissue_ridge.measure_tissue_ridge(data, TissueVolumeRidgeSettings(harmonise="combat"))
    ridge = tissue_ridge.measure_tissue_ridge(
        data, TissueVolumeRidgeSettings(harmonise="combat", reference=6)
    )
    assert ridge.reference == {"c": 6} and ridge.n_test == 18 and ridge.absolute is None
    with pytest.raises(UserError, match="found 24, which leaves no test volumes"):
        tissue_ridge.measure_tissue_ridge(
            data, TissueVolumeRidgeSettings(harmonise="combat", reference=24)
        )
    with pytest.raises(ValidationError, match="allowed: 0, or harmonise: combat"):
        TissueVolumeRidgeSettings(reference=3)

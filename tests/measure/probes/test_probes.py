"""What the probes of tissues, rescans and ages read from features and predictions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from moecore.core.routing_records import ModelOutput
from moecore.data.prepared import SPLITS
from moecore.measure.probes import ageing_and_rescans
from moecore.measure.probes.ageing_and_rescans import (
    UnseenPeopleSimulator,
    compare_sessions,
    measure_simulated_rescans,
    predict_ageing,
    predicted_ages,
    rank_correlations,
    rising_step_share,
    session_pairs,
)
from moecore.measure.probes.linear_probe import (
    PENALTIES,
    ModelAndProbeErrors,
    fit_ridge_probe,
    model_and_probe_errors,
    predict_volumes,
    predict_with_features,
    tissue_error_differences,
)
from tests.measure.subjects import Brightness, Source


class Pooled(nn.Module):
    """Its head reads the mean and the greatest voxel of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, images: torch.Tensor) -> ModelOutput:
        flat = images.flatten(1)
        return ModelOutput(self.head(torch.stack([flat.mean(1), flat.amax(1)], dim=1)))


def test_what_the_head_reads_and_says():
    images, model = torch.rand(7, 1, 2, 2, 2), Pooled().train()
    said, read = predict_with_features(model, images, 3)
    flat = images.flatten(1)
    np.testing.assert_allclose(read, torch.stack([flat.mean(1), flat.amax(1)], dim=1), rtol=1e-6)
    np.testing.assert_allclose(said, model(images).prediction[:, 0].detach(), rtol=1e-6)
    assert model.training and not model.head._forward_pre_hooks, "the model is left as it was"


def test_against_the_normal_equations():
    random = np.random.default_rng(0)
    features, ages = random.normal(3, 5, (60, 4)), random.normal(50, 10, 60)
    others = random.normal(3, 5, (30, 4)), random.normal(50, 10, 30)
    probe, penalty = fit_ridge_probe((features, ages), others)
    errors = {}
    for tried in PENALTIES:  # minimise |y - mean - Xw|^2 + 60 * penalty * |w|^2 of standardised X
        x = (features - features.mean(0)) / features.std(0)
        weights = np.linalg.solve(x.T @ x + 60 * tried * np.eye(4), x.T @ (ages - ages.mean()))
        errors[tried] = (others[0] - features.mean(0)) / features.std(0) @ weights + ages.mean()
    means = {tried: np.abs(found - others[1]).mean() for tried, found in errors.items()}
    assert penalty == min(means, key=means.get)
    np.testing.assert_allclose(probe.predict(others[0]), errors[penalty], rtol=1e-9)
    # features that do not vary say the mean age
    ages = np.array([20.0, 30.0, 70.0])
    probe, penalty = fit_ridge_probe((np.ones((3, 2)), ages), (np.ones((2, 2)), ages[:2]))
    assert probe.predict(np.ones((1, 2))).tolist() == pytest.approx([40])
    assert penalty == PENALTIES[-1]


def test_every_tissue_has_its_own_map():
    # Half of the voxels hold a tissue that is 0.2 bright, a quarter one of 0.4, a quarter one of
    # 0.8: their means are what is left of each.
    volumes = np.full((3, 1, 2, 2, 2), 0.2, np.float16)
    volumes[:, 0, 1, 0], volumes[:, 0, 1, 1] = 0.4, 0.8
    regions = np.zeros((3, 3, 2, 2, 2), np.uint8)
    regions[:, 0, 0] = regions[:, 1, 1, 0] = regions[:, 2, 1, 1] = 255
    test = SimpleNamespace(images=volumes, labels=np.zeros(3))
    data = SimpleNamespace(test=test, regions=lambda split: regions)
    for region, age in enumerate((20, 40, 80)):
        found = predict_volumes(Brightness(), data, "test", region, 2, None)
        assert found.predicted == pytest.approx([age] * 3, rel=1e-3)


def test_an_offset_does_not_count_for_the_probe(cohort):
    whole, white = (
        [errors.mean() for errors in model_and_probe_errors(Brightness(), cohort, place, 16, 256)]
        for place in (None, 0)
    )
    # a third of the brightness is 40 years too young, and as good a measure
    assert white[0] > 30 and white[1] < 3
    assert white[1] == pytest.approx(whole[1], rel=0.02)


def test_each_split_has_its_part_in_the_probe(cohort):
    # By hand: least squares of age on brightness over the training split, with the penalty that is
    # best for the validation split.
    found = model_and_probe_errors(Brightness(), cohort, None, 16, None)
    train, validation, test = (
        predict_volumes(Brightness(), cohort, split, None, 16, None) for split in SPLITS
    )
    centre, spread = train.predicted.mean(), train.predicted.std()
    together = ((train.predicted - centre) * train.ages).sum() / spread
    lines = {}
    for penalty in PENALTIES:
        slope = together / (len(train.ages) * (1 + penalty))
        lines[penalty] = lambda given, slope=slope: (
            train.ages.mean() + slope * (given - centre) / spread
        )
    errors = {
        penalty: np.abs(line(validation.predicted) - validation.ages).mean()
        for penalty, line in lines.items()
    }
    best = min(lines, key=errors.get)
    by_hand = np.abs(lines[best](test.predicted) - test.ages)
    np.testing.assert_allclose(found.probe, by_hand, rtol=1e-9)
    np.testing.assert_allclose(found.raw, np.abs(test.predicted - test.ages))


def test_few_volumes_are_spread_over_the_split(cohort):
    train = predict_volumes(Brightness(), cohort, "train", None, 16, None)
    few = predict_volumes(Brightness(), cohort, "train", 1, 16, 7)
    whole = dict(zip(train.ages.tolist(), train.predicted.tolist(), strict=True))
    assert len(few.ages) == len(set(few.ages)) == 7
    assert max(few.ages) > train.ages.mean() > min(few.ages)
    np.testing.assert_allclose(few.predicted, [whole[age] / 3 for age in few.ages], rtol=2e-3)


def test_tissues_are_compared_on_the_same_volumes():
    errors = {"wm": [5, 6, 7, 8], "gm": [4, 5, 6, 7], "csf": [6, 6, 6, 6]}
    tissues = {name: ModelAndProbeErrors(*[np.array(row)] * 2) for name, row in errors.items()}
    found = tissue_error_differences(tissues)
    assert list(found) == [("gm", "csf"), ("wm", "gm")]
    first = found["gm", "csf"]
    assert first.low < first.value == -0.5 < first.high < 1.5
    # every volume a year more: no doubt is left
    assert found["wm", "gm"] == (1.0, 1.0, 1.0)
    assert tissue_error_differences({"wm": tissues["wm"]}) == {}


def test_rising_steps_and_rank_correlations():
    # 5 of 6: the second subject's last step falls; standing still is no rise.
    assert rising_step_share(np.array([[1.0, 2, 3, 4], [1, 2, 3, 2.5]])) == pytest.approx(5 / 6)
    assert rising_step_share(np.array([[1.0, 1.0, 2.0]])) == 0.5
    ages, tied = [20, 40, 60, 90], [1, 1, 2, 2]
    predictions = np.array([[1.0, 4, 9, 16], [4, 3, 2, 1], tied, [5, 5, 5, 5], [2, 1, 4, 3]])
    # the last: 1 − 6·4/(4·15)
    expected = [1, -1, spearmanr(ages, tied).statistic, 0, 0.6]
    assert rank_correlations(ages, predictions) == pytest.approx(expected)


def test_only_age_changes_when_a_subject_is_aged():
    source = Source()
    found = predict_ageing(Brightness(), UnseenPeopleSimulator(source), 3, (20, 50, 80), 2)
    assert np.allclose(found, [[20, 50, 80]] * 3, atol=1e-4)
    # people from number 40 on are in no split
    asked = [(age, "FMF"[n], 7_000_040 + n, 0, 0) for n in range(3) for age in (20, 50, 80)]
    assert source.asked == asked


def test_a_scan_again_and_at_another_site():
    source = Source()
    ages = np.linspace(20, 80, 4)
    same, other = measure_simulated_rescans(Brightness(), UnseenPeopleSimulator(source), ages, 2)
    assert (same.value, other.value) == pytest.approx((0.1, 10.1), abs=1e-4)
    assert [asked[0] for asked in source.asked[:4]] == [20, 40, 60, 80]
    assert {asked[3:] for asked in source.asked} == {(0, 0), (1, 0), (1, 1)}
    # other people than those who are aged
    assert {asked[2] for asked in source.asked} == {7_000_540 + n for n in range(4)}


def test_sessions_within_the_time_are_pairs():
    rows = [("a", 50.0), ("b", 30.0), ("a", 51.0), ("a", 53.0), ("b", 30.5), ("c", 30.6)]
    subjects = [{"participant_id": name, "age": str(age)} for name, age in rows]
    # a: 50 → 51 yes, 51 → 53 no; b: 30 → 30.5; c is another person
    assert session_pairs(subjects) == [(0, 2), (1, 4)]
    assert session_pairs(subjects[:2]) == []


def test_sessions_of_one_person_are_compared_less_the_years_between(cohort, monkeypatch):
    rows = cohort.subjects("test")
    (a, b) = [place for place, row in enumerate(rows) if row["participant_id"] == "sub-test001"]
    years = abs(float(rows[a]["age"]) - float(rows[b]["age"]))
    monkeypatch.setattr(ageing_and_rescans, "RESCAN_YEARS", years / 2)
    assert session_pairs(rows) == []
    monkeypatch.setattr(ageing_and_rescans, "RESCAN_YEARS", years + 1)
    pairs = session_pairs(rows)
    assert len(pairs) == 1
    found = compare_sessions(Brightness(), cohort, pairs, 2)
    over = predicted_ages(Brightness(), cohort.test.images, 16) - cohort.test.labels
    assert found.value == pytest.approx(abs(over[a] - over[b]))

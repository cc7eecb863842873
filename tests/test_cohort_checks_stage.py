"""The stage ``cohort_checks``: models whose answers are known, and end to end on a small cohort that is not simulated."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from moecore.artifacts import save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.vit3d import Vit3d
from moecore.config import Config
from moecore.data.digits import Digits
from moecore.data.prepared import Prepared
from moecore.evaluation.linear_probe import PENALTIES
from moecore.files import StageError
from moecore.kept import Kept
from moecore.records import ModelOutput
from stages import cohort_checks as stage
from tests.cohort import write_cohort

PARAMS = """\
cohort_checks: {subjects: 3, ages: [20, 50, 80], rescans: 4, batch: %d, resamples: 100, years: %g}
data:
  pretrain: {kind: bids, root: nowhere}
"""


class Brightness(nn.Module):
    """Answers with 100 times the mean of the voxels that are not 0; 0 for an empty volume. Its head reads the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, volumes: torch.Tensor) -> ModelOutput:
        found = volumes.flatten(1)
        return ModelOutput(self.head((100 * found.sum(1) / (found != 0).sum(1).clamp(min=1))[:, None]))


class Source:
    """People of brightness age / 100, a tenth of a year brighter in a second scan, ten years brighter at another site; asks are noted."""

    subjects = 40

    def __init__(self) -> None:
        self.asked = []

    def person_seed(self, number: int) -> int:
        return 7_000_000 + number

    def draw(self, age, sex, seed, scan, site):
        self.asked.append((age, sex, seed, scan, site))
        return np.full((1, 2, 2, 2), (age + scan / 10 + 10 * site) / 100, np.float32), None


def settings(**changes) -> stage.CohortChecks:
    return stage.CohortChecks(**{"subjects": 3, "ages": (20, 50, 80), "rescans": 4, "batch": 2, "resamples": 100} | changes)


def test_only_age_changes_when_a_subject_is_aged():
    source = Source()
    found = stage.aged(Brightness(), source, settings())
    assert np.allclose(found["predictions"], [[20, 50, 80]] * 3, atol=1e-4) and found["monotone_share"] == 1 and found["rank_correlation"] == pytest.approx(1)
    assert source.asked == [(age, "FMF"[n], 7_000_040 + n, 0, 0) for n in range(3) for age in (20, 50, 80)], "people from number 40 on are in no split"


def test_a_scan_again_and_at_another_site():
    source = Source()
    found = stage.scanned_again(Brightness(), source, settings(seed=2), mae=5.0)
    assert found["pairs"] == 4 and found["mae"] == 5 and found["of"] == "simulated scans"
    assert found["mean_abs_difference"] == pytest.approx(0.1, abs=1e-4) and found["other_site_mean_abs_difference"] == pytest.approx(10.1, abs=1e-4)
    assert [asked[0] for asked in source.asked[:4]] == [20, 40, 60, 80] and {asked[3:] for asked in source.asked} == {(0, 0), (1, 0), (1, 1)}
    assert {asked[2] for asked in source.asked} == {7_002_540 + n for n in range(4)}, "other people than those who are aged"


def test_ages_must_rise():
    with pytest.raises(ValueError, match="rising ages, each once"):
        settings(ages=(50, 20))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("cohort") / "pretrain"
    folder.mkdir()
    return write_cohort(folder, simulated=False)


def test_one_tissue_is_the_volume_times_its_share(cohort):
    # Every voxel of the small cohort has a third (85 of 255) of each tissue: brightness falls to a third, in float16.
    whole = stage.answers(Brightness(), cohort.test.images, 7)
    for region in range(3):
        found = stage.seen(Brightness(), cohort, "test", region, 7)
        np.testing.assert_allclose(found.predicted, whole / 3, rtol=2e-3)
        np.testing.assert_array_equal(found.features[:, 0], found.predicted)
        np.testing.assert_array_equal(found.ages, cohort.test.labels)


def test_every_tissue_has_its_own_map():
    # Half of the voxels hold a tissue that is 0.2 bright, a quarter one of 0.4, a quarter one of 0.8: their means are what is left of each.
    volumes, regions = np.full((3, 1, 2, 2, 2), 0.2, np.float16), np.zeros((3, 3, 2, 2, 2), np.uint8)
    volumes[:, 0, 1, 0], volumes[:, 0, 1, 1] = 0.4, 0.8
    regions[:, 0, 0], regions[:, 1, 1, 0], regions[:, 2, 1, 1] = 255, 255, 255
    data = SimpleNamespace(test=SimpleNamespace(images=volumes, labels=np.zeros(3)), regions=lambda split: regions)
    found = [stage.seen(Brightness(), data, "test", region, 2).predicted.tolist() for region in range(3)]
    assert found == [pytest.approx([20] * 3, rel=1e-3), pytest.approx([40] * 3, rel=1e-3), pytest.approx([80] * 3, rel=1e-3)]


def test_an_offset_does_not_count_for_the_probe(cohort, tmp_path):
    errors = stage.of_tissues(Brightness(), cohort, settings(batch=16), Kept(tmp_path))
    found = {name: stage.summed(row, 100) for name, row in errors.items()}
    assert list(found) == ["whole", "wm", "gm", "csf"]
    assert found["wm"]["mae"] > 30 and found["wm"]["probe_mae"] < 3, "a third of the brightness is 40 years too young, and as good a measure"
    assert found["wm"]["probe_mae"] == pytest.approx(found["whole"]["probe_mae"], rel=0.02)
    for row in found.values():
        assert row["low"] <= row["mae"] <= row["high"] and row["probe_low"] <= row["probe_mae"] <= row["probe_high"]


def test_each_split_has_its_part_in_the_probe(cohort):
    # By hand: least squares of age on brightness over the training split, with the penalty that is best for the validation split.
    found, (train, validation, test) = stage.errors_of(Brightness(), cohort, None, 16), ((stage.seen(Brightness(), cohort, split, None, 16)) for split in ("train", "validation", "test"))
    centre, spread = train.predicted.mean(), train.predicted.std()
    lines = {}
    for penalty in PENALTIES:
        slope = ((train.predicted - centre) * train.ages).sum() / spread / (len(train.ages) * (1 + penalty))
        lines[penalty] = lambda given, slope=slope: train.ages.mean() + slope * (given - centre) / spread
    best = min(lines, key=lambda penalty: np.abs(lines[penalty](validation.predicted) - validation.ages).mean())
    assert found["penalty"] == best
    np.testing.assert_allclose(found["probe"], np.abs(lines[best](test.predicted) - test.ages), rtol=1e-9)
    np.testing.assert_allclose(found["raw"], np.abs(test.predicted - test.ages))
    few = stage.seen(Brightness(), cohort, "train", 1, 16, 7)
    whole = {age: value for age, value in zip(train.ages.tolist(), train.predicted.tolist(), strict=True)}
    assert len(few.ages) == len(set(few.ages)) == 7 and max(few.ages) > train.ages.mean() > min(few.ages)
    np.testing.assert_allclose(few.predicted, [whole[age] / 3 for age in few.ages], rtol=2e-3)


def test_tissues_are_compared_on_the_same_volumes():
    tissues = {"whole": {"probe": [0.0] * 4}, "wm": {"probe": [5.0, 6, 7, 8]}, "gm": {"probe": [4.0, 5, 6, 7]}, "csf": {"probe": [6.0, 6, 6, 6]}}
    first, second = stage.order_of(tissues, 200)
    assert first == {"less": "csf", "more": "gm", "difference": -0.5} | {key: first[key] for key in ("low", "high")} and first["low"] < -0.5 < first["high"] < 1.5
    assert second == {"less": "gm", "more": "wm", "difference": 1.0, "low": 1.0, "high": 1.0}, "every volume a year more: no doubt is left"
    assert stage.order_of({"whole": tissues["whole"]}, 200) is None


def test_sessions_of_one_person_are_compared_less_the_years_between(cohort):
    rows = cohort.subjects("test")
    (a, b) = [place for place, row in enumerate(rows) if row["participant_id"] == "sub-test001"]
    years = abs(float(rows[a]["age"]) - float(rows[b]["age"]))
    assert stage.sessions_again(Brightness(), cohort, settings(years=years / 2), 5.0) is None
    found = stage.sessions_again(Brightness(), cohort, settings(years=years + 1), 5.0)
    answers = stage.answers(Brightness(), cohort.test.images, 16) - cohort.test.labels
    assert found["pairs"] == 1 and found["of"] == "sessions" and found["mean_abs_difference"] == pytest.approx(abs(answers[a] - answers[b]))


@pytest.fixture
def project(tmp_path, monkeypatch, cohort):
    """A folder with the cohort, one dense model, and small settings."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"MOECORE_TRACKING": "off", "MOECORE_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    (tmp_path / "params.yaml").write_text(PARAMS % (16, 200))
    (tmp_path / "artifacts/data").mkdir(parents=True)
    (tmp_path / "artifacts/data/pretrain").symlink_to(cohort.folder)
    target = tmp_path / "artifacts/pretrain/dense/0"
    target.mkdir(parents=True)
    torch.manual_seed(0)
    save_model(target, Vit3d(patch=8, width=8, depth=1, heads=1, mlp_ratio=1).build(ImageSpec.from_card(cohort.card)))
    return tmp_path


def test_a_real_cohort_end_to_end(project):
    stage.cohort_checks("pretrain", "dense", 0)
    found = json.loads((project / "artifacts/measured/cohort_checks/pretrain/dense/0.json").read_text())
    assert found["simulated"] is False and found["ageing"] is None and "kind: phantom" in found["reasons"]["ageing"]
    assert list(found["isolated"]) == ["wm", "gm", "csf"] and found["rescan"]["pairs"] == 1 and found["rescan"]["mae"] == found["whole"]["mae"]
    assert found["n_test"] == 40 and 5 < found["median_mae"] < 15


def test_the_batch_plays_no_part(project):
    stage.cohort_checks("pretrain", "dense", 0)
    path = project / "artifacts/measured/cohort_checks/pretrain/dense/0.json"
    before = json.loads(path.read_text())
    (project / "params.yaml").write_text(PARAMS % (5, 200))
    stage.cohort_checks("pretrain", "dense", 0)
    after = json.loads(path.read_text())
    for region, row in before["isolated"].items():
        assert after["isolated"][region]["mae"] == pytest.approx(row["mae"], rel=1e-5)


def test_data_with_classes_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS % (16, 1))
    (tmp_path / "artifacts/data/pretrain").mkdir(parents=True)
    Digits(size=8, train_limit=40, test_limit=20).prepare(tmp_path / "artifacts/data/pretrain")
    with pytest.raises(StageError, match="cohort_checks: data.pretrain has classes, not ages; allowed: a cohort"):
        stage.cohort_checks("pretrain", "dense", 0)


def test_params_are_a_config():
    assert issubclass(stage.Params, Config) and set(stage.Params.model_fields) == {"cohort_checks", "source"}

from types import SimpleNamespace

import numpy as np
import pytest

from moecore.data.prepared import SPLITS, Prepared
from moecore.measure.probes.linear_probe import PENALTIES
from moecore.measure.probes.people import predicted_ages
from moecore.measure.probes.tissues import VolumeErrors, errors_of, order_of, seen, summed
from tests.cohort import write_cohort
from tests.measure.brightness import Brightness


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("cohort") / "pretrain"
    folder.mkdir()
    return write_cohort(folder, simulated=False)


def test_one_tissue_is_the_volume_times_its_share(cohort):
    # Every voxel of the small cohort has a third (85 of 255) of each tissue: brightness falls to a
    # third, in float16.
    whole = predicted_ages(Brightness(), cohort.test.images, 7)
    for region in range(3):
        found = seen(Brightness(), cohort, "test", region, 7)
        np.testing.assert_allclose(found.predicted, whole / 3, rtol=2e-3)
        np.testing.assert_array_equal(found.features[:, 0], found.predicted)
        np.testing.assert_array_equal(found.ages, cohort.test.labels)


def test_every_tissue_has_its_own_map():
    # Half of the voxels hold a tissue that is 0.2 bright, a quarter one of 0.4, a quarter one of
    # 0.8: their means are what is left of each.
    volumes = np.full((3, 1, 2, 2, 2), 0.2, np.float16)
    volumes[:, 0, 1, 0] = 0.4
    volumes[:, 0, 1, 1] = 0.8
    regions = np.zeros((3, 3, 2, 2, 2), np.uint8)
    regions[:, 0, 0] = 255
    regions[:, 1, 1, 0] = 255
    regions[:, 2, 1, 1] = 255
    test = SimpleNamespace(images=volumes, labels=np.zeros(3))
    data = SimpleNamespace(test=test, regions=lambda split: regions)
    for region, age in enumerate((20, 40, 80)):
        found = seen(Brightness(), data, "test", region, 2)
        assert found.predicted == pytest.approx([age] * 3, rel=1e-3)


def test_an_offset_does_not_count_for_the_probe(cohort):
    places = {"whole": None, "wm": 0, "gm": 1, "csf": 2}
    found = {
        name: summed(errors_of(Brightness(), cohort, place, 16, 256), 100)
        for name, place in places.items()
    }
    # a third of the brightness is 40 years too young, and as good a measure
    assert found["wm"].mae > 30
    assert found["wm"].probe_mae < 3
    assert found["wm"].probe_mae == pytest.approx(found["whole"].probe_mae, rel=0.02)
    for row in found.values():
        assert row.low <= row.mae <= row.high
        assert row.probe_low <= row.probe_mae <= row.probe_high


def test_each_split_has_its_part_in_the_probe(cohort):
    # By hand: least squares of age on brightness over the training split, with the penalty that is
    # best for the validation split.
    found = errors_of(Brightness(), cohort, None, 16)
    train, validation, test = (seen(Brightness(), cohort, split, None, 16) for split in SPLITS)
    centre, spread = train.predicted.mean(), train.predicted.std()
    together = ((train.predicted - centre) * train.ages).sum() / spread
    lines = {}
    for penalty in PENALTIES:
        slope = together / (len(train.ages) * (1 + penalty))
        lines[penalty] = lambda given, slope=slope: (
            train.ages.mean() + slope * (given - centre) / spread
        )
    best = min(
        lines,
        key=lambda penalty: np.abs(lines[penalty](validation.predicted) - validation.ages).mean(),
    )
    assert found.penalty == best
    by_hand = np.abs(lines[best](test.predicted) - test.ages)
    np.testing.assert_allclose(found.probe, by_hand, rtol=1e-9)
    np.testing.assert_allclose(found.raw, np.abs(test.predicted - test.ages))


def test_few_volumes_are_spread_over_the_split(cohort):
    train = seen(Brightness(), cohort, "train", None, 16)
    few = seen(Brightness(), cohort, "train", 1, 16, 7)
    whole = dict(zip(train.ages.tolist(), train.predicted.tolist(), strict=True))
    assert len(few.ages) == len(set(few.ages)) == 7
    assert max(few.ages) > train.ages.mean() > min(few.ages)
    np.testing.assert_allclose(few.predicted, [whole[age] / 3 for age in few.ages], rtol=2e-3)


def errors(*probe: float) -> VolumeErrors:
    return VolumeErrors(penalty=1, raw=probe, probe=probe)


def test_tissues_are_compared_on_the_same_volumes():
    tissues = {
        "whole": errors(0, 0, 0, 0),
        "wm": errors(5, 6, 7, 8),
        "gm": errors(4, 5, 6, 7),
        "csf": errors(6, 6, 6, 6),
    }
    first, second = order_of(tissues, 200)
    assert (first.less, first.more, first.difference) == ("csf", "gm", -0.5)
    assert first.low < -0.5 < first.high < 1.5
    # every volume a year more: no doubt is left
    assert (second.less, second.more) == ("gm", "wm")
    assert second.difference == second.low == second.high == 1.0
    assert order_of({"whole": tissues["whole"]}, 200) is None

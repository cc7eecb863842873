"""The checks of a small cohort that is not simulated."""

import pytest
import torch

from moecore.data.prepared import Prepared
from moecore.measure import cohort_checks
from moecore.measure.base import Subject, at_once
from moecore.measure.cohort_checks import CohortChecks
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit3d import Vit3d
from tests.cohort import write_cohort
from tests.measure.subjects import built, digits, measured_twice


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

"""Every measurement of the table has the four names, and its results are read back. Measurements of
a model of age on volumes, and those that do not apply to it.
"""

import numpy as np
import pytest
import torch

from moecore.core.files import to_jsonable, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.views import AffineRanges, ViewSettings
from moecore.measure.base import (
    MeasuredModel,
    Skipped,
    builtin_measurements,
    find_measurement,
    read_result,
)
from moecore.measure.exploring.expert_overlays import overlay_middle_slices, parse_expert_grid
from moecore.measure.routing import Routing
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.measure.values import Found
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.predict import predict_in_batches
from moecore.testing import check_measurement
from tests.measure.subjects import built

ELSEWHERE = {"cohort_checks", "word_swaps", "retrieval", "zero_shot", "truth"}  # their subjects


def test_why_something_was_skipped_is_read_back(tmp_path):
    write_json(tmp_path / "0.json", to_jsonable(Skipped(skipped="no routing")))
    found = read_result(tmp_path / "0.json", Found, "routing")
    assert found == Skipped(skipped="no routing")


def test_a_dense_model_is_skipped_where_routing_is_measured(data):
    dense = MeasuredModel(built(SingleLayer(), None, data, 1), data)
    skipped = {what for what, found in builtin_measurements().items() if found.applies(dense)}
    routed = {"routing", "invariance", "explorer"}
    routed |= {"expert_worth", "fewer_experts", "router_regret"}
    assert skipped == routed | ELSEWHERE


ROUTING = Routing.model_validate(
    {
        "images": 12,
        "overlays": 3,
        "views": {"shift": 2, "flip": True, "affine": {"degrees": 10}},
        "augmentations": ["identity", "noise", "shift", "flip", "rotation", "affine"],
        "augmentation_images": 6,
        "sweeps": {"k": [1, 2], "threshold": [], "images": 8},
    }
)


@pytest.fixture(scope="module")
def subject(aged) -> MeasuredModel:
    return aged["moe"]


@pytest.fixture(scope="module")
def found(subject) -> Found:
    return check_measurement(ROUTING, subject)


@pytest.mark.parametrize("what", ["invariance", "corruptions", "stability", "lipschitz"])
def test_measurements_of_flat_images_do_not_apply(subject, what):
    assert "volumes" in find_measurement(what).applies(subject)


def test_routing_of_volumes(found):
    assert len(found.curve("load_cv2_layer", "layer")) == 2
    rows = found.curve("match_top1_augmented", "augmentation")
    assert list(rows) == ["identity", "noise", "shift", "flip", "rotation", "affine"]
    assert rows["identity"] == 1
    # every cube of every volume has its partner
    assert 0 < found.find("match_top1").value <= 1
    assert found.facts["overlays"]["shape"] == [3, 1, 16, 16]


def test_the_sweeps_own_setting_has_the_models_error(subject, found):
    where = evenly_spaced_indices(40, 12)[evenly_spaced_indices(12, 8)]
    test = subject.data.test
    predicted = predict_in_batches(subject.model, test.images[where], 5)[0][:, 0].numpy()
    errors = np.abs(predicted - test.labels[where])
    assert found.find("score_k", k=1).value == pytest.approx(float(errors.mean()), rel=1e-5)


def test_mid_slices_by_hand():
    # One volume of 4 × 2 × 6 voxels in cubes of 2: a grid of 2 × 1 × 3; the middle row of cubes
    # along the last axis holds voxels 2 and 3.
    volume = np.zeros((1, 1, 4, 2, 6), np.float16)
    # (right, anterior) of the shown slice
    volume[0, 0, :, :, 3] = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.0], [0.0, 0.0]])
    layout = TokenLayout(special=1, grid=(2, 1, 3), size=(4, 2, 6))
    combine = torch.zeros(1, 7, 5)
    combine[0, 1 + 1, 4] = combine[0, 1 + 4, 2] = 1  # cubes (0, 0, 1) and (1, 0, 1) alone
    record = RoutingRecord(*[combine] * 5)
    found = overlay_middle_slices(volume, (record,), layout)
    assert found.shape == (1, 1, 2, 4) and found.experts == 5
    # anterior up, right to the right
    assert found.images()[0, 0].tolist() == [[51, 153, 255, 0], [0, 102, 204, 0]]
    assert parse_expert_grid(found.grids[0][0]).tolist() == [[4, 2]]
    special = combine.clone()
    special[0, 0] = 9  # the class token's expert is not shown
    assert overlay_middle_slices(volume, (RoutingRecord(*[special] * 5),), layout) == found


def test_noise_leaves_the_background_of_volumes():
    volumes = np.zeros((2, 1, 8, 8, 8), np.float16)
    volumes[:, :, 2:6, 2:6, 2:6] = 0.5
    views = draw_two_views(volumes, TwoViewAugmentation(name="noise", noise=0.1), 0)
    assert views.images.shape == (4, 1, 8, 8, 8) and views.affines.shape == (4, 4, 4)
    assert (views.images[:, :, 0] == 0).all() and torch.equal(views.affines[0], torch.eye(4))
    assert float(views.images[:, :, 2:6, 2:6, 2:6].std()) == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(views.images[0], views.images[2]), "two views of a volume differ"
    turned = ViewSettings(affine=AffineRanges(degrees=20))
    moved = draw_two_views(volumes, TwoViewAugmentation(name="turned", views=turned), 0)
    assert not torch.equal(moved.affines[0], moved.affines[2])


def test_people_with_several_sessions_are_one_item(subject, found):
    test = subject.data.test
    names = [row["participant_id"] for row in subject.data.subjects("test")]
    assert len(test.people) == len(names) > len(set(names))
    assert len(set(zip(test.people.tolist(), names, strict=True))) == len(set(names))
    shown = test.people_at(evenly_spaced_indices(len(names), 12))
    few = shown[evenly_spaced_indices(12, 6)]
    for one in found.values:
        if one.items:
            people = few if "augmentation" in one.at else shown
            assert len(one.array) == len(set(people.tolist()))
            assert one.array.mean() == pytest.approx(one.value, abs=1e-6)

import copy
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from moecore import UserError, predict_in_batches
from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.core.streams import derived_seed, generator_for
from moecore.data.views.random_views import make_random_views
from moecore.measure.routing_metrics import epoch_routing as epochs
from moecore.measure.routing_metrics import interventions, two_view_agreement
from moecore.measure.routing_metrics.interventions import SweepImages, sweep_k
from moecore.measure.routing_metrics.layer_metrics import class_expert_probs
from moecore.measure.routing_metrics.two_view_agreement import PRESETS, Preset, TwoViewAugmentation
from moecore.nn.encoded_routing import encode_predictions_and_records
from moecore.tasks.classification import Classification
from moecore.training.single_tissue_volumes import keep_only_tissue
from tests.data.making import ball
from tests.measure.subjects import images, moe, subject, volumes
from tests.methods import KINDS, METHODS, tiny

NAMES = ("wm", "gm", "free_2")
PICTURES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
SCORES = torch.tensor(
    [[0.9, 0.6, 0.75, 0.1], [0.8, 0.1, 0.2, 0.3], [0.5, 0.4, 0.3, 0.2], [0.1, 0.2, 0.9, 0.6]]
)
IMAGES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(3))
SAMPLE = SweepImages(IMAGES, torch.arange(12) % 2, Classification(classes=("a", "b")))
WITH_K = [name for name in KINDS if METHODS[name].router.kind != "soft_slots"]
ERMOE = [name for name in KINDS if METHODS[name].router.kind == "eigenbasis"]


class Bright(nn.Module):
    """The best of: expert 0 likes a cube's largest voxel, 1 the opposite, 2 is at 0.5."""

    layout = TokenLayout(1, (2, 2, 2), (4, 4, 4))

    def forward(self, images):
        cubes = torch.nn.functional.adaptive_max_pool3d(images, self.layout.grid).flatten(1)
        special = torch.full((len(images), 1), 7.0)  # a token that likes expert 0 very much
        first = torch.cat([special, cubes], dim=1)
        scores = torch.stack([first, 1 - first, torch.full_like(first, 0.5)], dim=-1)
        chosen = torch.nn.functional.one_hot(scores.argmax(dim=-1), 3).bool()
        layers = (scores * 100, ~chosen), (scores, chosen)
        records = [RoutingRecord(logits, *[scores] * 2, mask, scores) for logits, mask in layers]
        return ModelOutput(images.mean(dim=(1, 2, 3, 4))[:, None], tuple(records))


def test_rows_by_hand():
    # two volumes of 4³ in cubes of 2³. tissue a: one voxel of grey 0.9 in each volume; tissue b: a
    # voxel of 0.1 in the first volume and two in different cubes of the second, so three cubes; the
    # other cubes and the special token do not count.
    volumes, regions = np.zeros((2, 1, 4, 4, 4), np.float16), np.zeros((2, 2, 4, 4, 4), np.uint8)
    volumes[:, 0, 0, 0, 0], regions[:, 0, 0, 0, 0] = 0.9, 255
    for volume, place in ((0, (3, 3, 3)), (1, (3, 3, 3)), (1, (0, 3, 3))):
        volumes[(volume, 0, *place)], regions[(volume, 1, *place)] = 0.1, 255
    rows = {
        row.region: row
        for row in epochs.route_single_tissues(Bright(), volumes, regions, "ab", NAMES)
    }
    assert list(rows) == ["a", "b", "random_a", "random_b"]
    for tissue, best in (("a", "wm"), ("b", "gm")):
        names, scores = zip(*rows[tissue].experts, strict=True)
        assert names == (best, "free_2") and scores == pytest.approx([0.9, 0.5], abs=1e-3)
        assert rows[tissue].share == {name: float(name == best) for name in NAMES}


def test_a_share_scales_the_voxels():
    volume = torch.full((1, 1, 1, 1, 2), 0.8)
    share = torch.tensor([[[[255, 51]]]], dtype=torch.uint8)
    torch.testing.assert_close(keep_only_tissue(volume, share).flatten(), torch.tensor([0.8, 0.16]))
    assert keep_only_tissue(volume.half(), share).dtype == torch.float16


def test_the_control_keeps_as_much_inside_the_brain_and_nothing_outside():
    image, regions = ball(60, 0)
    part, brain = torch.from_numpy(regions[None, 0]), torch.from_numpy(image > 0)
    found = epochs.shuffle_tissue_in_brain(part, brain, 3)
    assert torch.equal(found[brain].sort().values, part[brain].sort().values)
    assert (found[~brain] == 0).all() and not torch.equal(found, part)
    assert not torch.equal(found, epochs.shuffle_tissue_in_brain(part, brain, 4))
    two = epochs.shuffle_tissue_in_brain(part.expand(2, -1, -1, -1), brain.expand(2, -1, -1, -1), 3)
    assert torch.equal(two[0], found[0]) and not torch.equal(two[0], two[1])


def record_of(probs: torch.Tensor) -> RoutingRecord:
    other = torch.full_like(probs, 9.0)  # only the clean probs may be read
    return RoutingRecord(other, probs, other, other > 0, other)


def test_class_maps_by_hand():
    # three images, two tokens; no image has class 1
    probs = torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]], [[1, 0, 0], [0, 0, 1]]])
    layers = [record_of(probs), record_of(probs.flip(-1))]
    maps = class_expert_probs(layers, torch.tensor([2, 0, 2]), 3)
    assert maps.shape == (3, 2, 3) and maps.dtype == torch.float64
    # class 0: image 1 alone; class 2: images 0 and 2, four tokens: twice expert 0, once 1, once 2
    assert maps[::2, 0].tolist() == [[0, 0, 1], [0.5, 0.25, 0.25]] and maps[1].isnan().all()
    assert torch.equal(maps[::2, 1], maps[::2, 0].flip(-1))


@pytest.mark.parametrize("kind", get_args(Preset))
def test_views_are_functions_of_seed_and_place(kind):
    random = torch.get_rng_state()
    views = two_view_agreement.draw_two_views(PICTURES, PRESETS[kind], 1, 7)
    assert torch.equal(torch.get_rng_state(), random) and PRESETS[kind].name == kind
    assert views.images.shape == (24, 1, 8, 8) and views.affines.shape == (24, 3, 3)
    assert 0 <= views.images.min() <= views.images.max() <= 1
    again = two_view_agreement.draw_two_views(PICTURES, PRESETS[kind], 1, 7)
    assert torch.equal(views.images, again.images) and torch.equal(views.affines, again.affines)
    for draws in ((2, 7), (1, 8), (1,)):
        other = two_view_agreement.draw_two_views(PICTURES, PRESETS[kind], *draws)
        assert torch.equal(views.images, other.images) == (kind == "identity")
    assert torch.equal(views.images[:12], views.images[12:]) == (kind == "identity")
    still = kind in ("identity", "noise", "brightness", "contrast", "erasing")
    assert torch.equal(views.affines, torch.eye(3).expand(24, 3, 3)) == still


def test_first_images_keep_their_views_when_there_are_more():
    images = np.random.default_rng(0).integers(0, 256, (130, 1, 8, 8), dtype=np.uint8)
    draw, crop = two_view_agreement.draw_two_views, PRESETS["crop"]
    few, many = (draw(part, crop, 0) for part in (images[:100], images))
    assert torch.equal(many.images[:100], few.images[:100])
    assert torch.equal(many.affines[130:230], few.affines[100:])
    generator = generator_for(derived_seed("measured_views", 0), 100, 1)
    by_hand = make_random_views(torch.from_numpy(images[100:]), PRESETS["crop"].views, generator)
    assert torch.equal(many.images[230:], by_hand.images)
    assert torch.equal(many.affines[230:], by_hand.affines)


def test_noise_has_its_size_and_moves_nothing():
    grey = np.full((40, 1, 8, 8), 128, np.uint8)
    views = two_view_agreement.draw_two_views(grey, TwoViewAugmentation(name="noise", noise=0.1), 0)
    noise = views.images - 128 / 255
    assert noise.std().item() == pytest.approx(0.1, rel=0.04) and abs(noise.mean()) < 0.006
    correlation = float((noise[:40] * noise[40:]).mean()) / 0.01
    assert abs(correlation) < 0.08, "the two views have draws of their own"


def test_places_are_spread_and_stay(tmp_path):
    assert epochs.nested_spread_indices(16, 8) == [0, 8, 4, 12, 2, 10, 6, 14]
    for total in (1, 2, 7, 50, 10_000):
        every = epochs.nested_spread_indices(total, 32)
        assert len(every) == len(set(every)) == min(32, total)
        assert all(0 <= place < total for place in every)
        assert [epochs.nested_spread_indices(total, number) for number in (1, 5)] == [
            every[:1],
            every[:5],
        ]
    assert sorted(epochs.nested_spread_indices(7, 99)) == list(range(7))
    # of volumes fewer than of images
    assert len(epochs.explorer_image_indices(images(), 32)) == 32
    assert len(epochs.explorer_image_indices(volumes(tmp_path).data, 32)) == 6


def test_watched_epochs():
    assert epochs.choose_explorer_epochs(1) == (1,) and epochs.choose_explorer_epochs(5) == (
        1,
        2,
        3,
        4,
        5,
    )
    many = epochs.choose_explorer_epochs(300)
    assert len(many) == 12 and (many[0], many[-1]) == (1, 300)
    assert {later - earlier for earlier, later in zip(many, many[1:], strict=False)} <= {27, 28}


def test_what_was_kept_is_what_the_model_did(tmp_path):
    models = {epoch: subject(images(), moe(), seed=epoch) for epoch in (1, 2)}
    data = models[1].data
    first, other = (epochs.EpochRecorder(tmp_path, models[e].model, data, (), 2, 0) for e in (1, 2))
    first.write_trace(1)
    with pytest.raises(UserError, match="traces/0002.json: no such file"):
        first.read_traces()
    other.write_trace(2)
    found = other.read_traces()
    assert [one.epoch for one in found] == [1, 2]
    where = epochs.explorer_image_indices(data, 32)
    for one in found:
        assert one.images == tuple(where)
        seen = predict_in_batches(models[one.epoch].model, data.test.images[where], 32)
        assert one.trace == encode_predictions_and_records(*seen, data.task)
    assert found[0].trace != found[1].trace


@pytest.mark.parametrize("name", KINDS)
def test_the_same_setting_gives_the_same_model(name):
    model = tiny(name)
    other = interventions.copy_with_router(model, model.moe.router)
    assert other is not model and other.moe == model.moe and other.training == model.training
    ours, first = predict_in_batches(model, IMAGES, 12)
    theirs, second = predict_in_batches(other, IMAGES, 12)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a.combine, b.combine) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", WITH_K)
def test_every_router_with_k_has_a_sweep_and_the_model_stays(name):
    model = tiny(name).train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    router, rows = model.moe.router, sweep_k(model, SAMPLE, (1, 2, 8, 9), 12)
    assert list(rows) == [1, 2, 8], "9 of 8 experts cannot be"
    assert model.moe.router is router and model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for row in rows.values():
        assert 0 <= row["load_cv2"] <= 7 + 1e-9 and 0 <= row["score"] <= 1
    if METHODS[name].router.kind != "eigenbasis":
        assert rows[8]["load_cv2"] == rows[8]["tail_mass"] == 0, "all experts for every token"
        assert all(0 <= row["tail_mass"] <= 1 - k / 8 + 1e-6 for k, row in rows.items())


@pytest.mark.parametrize("name", ["stable_moe", "teacher_routed", "hash_moe", "ermoe"])
def test_the_changed_model_really_chooses_k(name):
    model = tiny(name)
    copied = interventions.copy_with_router(model, model.moe.router.with_k(3))
    _, records = predict_in_batches(copied, IMAGES, 12)
    numbers = torch.stack([record.chosen.sum(-1) for record in records])
    assert numbers.max() == 3 and (METHODS[name].router.kind == "eigenbasis" or numbers.min() == 3)


@pytest.mark.parametrize("name", ERMOE)
def test_a_higher_threshold_falls_back_more_often(name):
    model = tiny(name)
    rows = interventions.sweep_threshold(model, SAMPLE, (-1.0, 0.1, 0.5, 0.9, 1.0), 12)
    fallback = [row["fallback"] for row in rows.values()]
    assert fallback[0] == 0 < fallback[3] and fallback[1] < fallback[3] and fallback[-1] == 1
    assert "tail_mass" not in rows[1.0] and rows[-1.0]["tail_mass"] > 0


def test_routers_without_the_setting_have_no_rows():
    for name, numbers in (("soft_moe", []), ("vmoe", [1, 2])):
        assert list(sweep_k(tiny(name), SAMPLE, (1, 2), 12)) == numbers
        assert interventions.sweep_threshold(tiny(name), SAMPLE, (0.1,), 12) == {}


@pytest.mark.parametrize("name", ["vmoe", "expert_choice"])
def test_no_row_depends_on_the_batch(name):
    whole, parts = (sweep_k(tiny(name), SAMPLE, (1, 2), batch) for batch in (12, 5))
    assert whole.keys() == parts.keys()
    for k, values in whole.items():
        assert values == pytest.approx(parts[k], abs=1e-6)


def record(scores: torch.Tensor, *chosen: str) -> RoutingRecord:
    mask = torch.tensor([[[mark == "x" for mark in token]] for token in chosen])
    probs = (scores / scores.sum(-1, keepdim=True))[:, None]
    return RoutingRecord(scores[:, None], probs, mask.float(), mask, probs * mask)


# counts 3, 1, 2, 1: mean 7/4, mean of squares 15/4
FIRST = record(SCORES, "x.x.", "x...", "xx..", "..xx")
# counts 4, 4, 0, 0; no preference, none above 0.5
SECOND = record(torch.ones(4, 4) / 5, *("xx..",) * 4)


def test_means_of_a_sweep_without_and_with_a_threshold():
    means = interventions.mean_routing_metrics([FIRST, SECOND], k=2, threshold=None)
    assert means["load_cv2"] == pytest.approx((15 / 4 / (7 / 4) ** 2 - 1 + 1) / 2)
    # Outside the best two: (0.6 + 0.1)/2.35, 0.3/1.4, 0.5/1.4, 0.3/1.8; in the second layer 1/2.
    tails = [(0.7 / 2.35 + 0.3 / 1.4 + 0.5 / 1.4 + 0.3 / 1.8) / 4, 0.5]
    assert means["tail_mass"] == pytest.approx(sum(tails) / 2) and "fallback" not in means
    means = interventions.mean_routing_metrics([FIRST, FIRST], k=2, threshold=0.5)
    # Above 0.5: three, one, none and two scores.
    assert means["fallback"] == 0.25 and means["tail_mass"] == pytest.approx(0.6 / 2.25 / 3)
    # a layer without eligible experts leaves no mean
    means = interventions.mean_routing_metrics([FIRST, SECOND], k=2, threshold=0.5)
    assert "tail_mass" not in means and means["fallback"] == (0.25 + 1) / 2

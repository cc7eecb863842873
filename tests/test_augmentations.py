"""Matches of corresponding patches in two recorded views, kind by kind."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore.augmentations import NAMES, PRESETS, Augmentation, Preset, chance, measured, resolved, two_views
from moecore.data.loader import generator_for
from moecore.data.views import ViewSettings, make_views
from moecore.records import Layout, ModelOutput, RoutingRecord
from tests.routed import KINDS, tiny

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)


class ByPixel(nn.Module):
    """Each of the 4 × 4 patches of 2 × 2 pixels goes to the expert that its first pixel names: level e / 16 is expert e, the second is e + 1."""

    layout = Layout(0, (4, 4), (8, 8))

    def forward(self, images: Tensor) -> ModelOutput:
        expert = (images[:, 0, ::2, ::2].flatten(1) * 255 / 16).round().long() % 8
        probs = nn.functional.one_hot(expert, 8) * 0.7 + nn.functional.one_hot((expert + 1) % 8, 8) * 0.2 + 0.1 / 8
        chosen = nn.functional.one_hot(expert, 8).bool()
        return ModelOutput(images.flatten(1)[:, :2], (RoutingRecord(probs, probs, probs, chosen, probs * chosen),))


def coded(count: int) -> np.ndarray:
    """Images whose every patch has one of eight levels, 0 to 7 times 16."""
    levels = np.random.default_rng(1).integers(0, 8, (count, 1, 4, 4)) * 16
    return levels.repeat(2, 2).repeat(2, 3).astype(np.uint8)


def test_partners_of_mirrored_views_are_found_through_the_affines():
    views = two_views(coded(250), PRESETS["flip"], 0)
    mirrored = (views.affines[:250] != views.affines[250:]).flatten(1).any(1)
    assert 90 < mirrored.sum() < 160, "about half of the pairs differ"
    found = measured(ByPixel(), views, 64)
    assert found["pairs"] == 250 * 16 and [found[name] for name in NAMES] == [1, 1, 1] and found["chosen_iou"] == 1
    unmatched = measured(ByPixel(), views._replace(affines=torch.eye(3).expand(500, 3, 3)), 64)
    # Half of the pairs are compared at the wrong place, where one of eight experts matches by chance.
    assert unmatched["match_top1"] == pytest.approx(0.5 + 0.5 / 8, abs=0.07) == unmatched["chosen_iou"]
    assert unmatched["independent_top1"] == pytest.approx(1 / 8, abs=0.01) and unmatched["chance_iou"] == pytest.approx(1 / 8)


def test_shares_by_hand():
    # Two images, the second view of the first with other levels in 4 of 16 patches, of the second in 12: of 32 pairs 16 match.
    first = coded(2)
    second = first.copy()
    second[0, :, :, :2] = (second[0, :, :, :2] + 16) % 128
    second[1, :, :, :6] = (second[1, :, :, :6] + 16) % 128
    pixels = torch.from_numpy(np.concatenate([first, second])).float() / 255
    found = measured(ByPixel(), type(two_views(first, PRESETS["identity"], 0))(pixels, torch.eye(3).expand(4, 3, 3)), 4)
    assert found["pairs"] == 32 and [found[name] for name in NAMES] == [0.5, 0.5, 0.5]
    # Resamples of two images have 12/16, 8/16 or 4/16; reflected at 0.5 the limits stay.
    assert (found["match_top1_low"], found["match_top1_high"]) == (0.25, 0.75)
    assert found["confidence"] == pytest.approx({"highest": 0.7125, "second": 0.2125, "others": 0.075})
    assert found["layers"][0]["confidence"] == found["confidence"]


@pytest.mark.parametrize("name", KINDS)
def test_the_same_view_twice_matches_everywhere(name):
    found = measured(tiny(name), two_views(IMAGES, PRESETS["identity"], 0), 24)
    assert [found[key] for key in (*NAMES, "chosen_iou", "match_top1_low", "match_top1_high")] == [1] * 6 and found["pairs"] == 12 * 16
    assert len(found["layers"]) == 2


@pytest.mark.parametrize("name", ["vmoe", "ermoe", "expert_choice"])
@pytest.mark.parametrize("kind", ["noise", "crop", "randaugment"])
def test_ratios_are_ordered_have_intervals_and_do_not_depend_on_the_batch(name, kind):
    views = two_views(IMAGES, PRESETS[kind], 3)
    found, parts = (measured(tiny(name), views, batch) for batch in (24, 5))
    assert found["match_top2_ordered"] <= min(found["match_top1"], found["match_top2_sets"]) and found["match_top1"] < 1
    for key in NAMES:
        assert 0 <= found[f"{key}_low"] <= found[key] <= found[f"{key}_high"] <= 1
        assert found[key] == pytest.approx(sum(layer[key] for layer in found["layers"]) / 2) == pytest.approx(parts[key])
    assert found["draws"] == parts["draws"] and 0 < found["chosen_iou"] < 1 and 0 < found["chance_iou"] < 1


@pytest.mark.parametrize("kind", get_args(Preset))
def test_views_are_functions_of_seed_and_place(kind):
    random = torch.get_rng_state()
    views = two_views(IMAGES, PRESETS[kind], 1, 7)
    assert torch.equal(torch.get_rng_state(), random) and PRESETS[kind].name == kind
    assert views.images.shape == (24, 1, 8, 8) and views.affines.shape == (24, 3, 3) and 0 <= views.images.min() <= views.images.max() <= 1
    again = two_views(IMAGES, PRESETS[kind], 1, 7)
    assert torch.equal(views.images, again.images) and torch.equal(views.affines, again.affines)
    others = [two_views(IMAGES, PRESETS[kind], 2, 7), two_views(IMAGES, PRESETS[kind], 1, 8), two_views(IMAGES, PRESETS[kind], 1)]
    assert all(torch.equal(views.images, other.images) == (kind == "identity") for other in others)
    assert torch.equal(views.images[:12], views.images[12:]) == (kind == "identity")
    still = kind in ("identity", "noise", "brightness", "contrast", "erasing")
    assert torch.equal(views.affines, torch.eye(3).expand(24, 3, 3)) == still


def test_first_images_keep_their_views_when_there_are_more():
    images = np.random.default_rng(0).integers(0, 256, (130, 1, 8, 8), dtype=np.uint8)
    few, many = two_views(images[:100], PRESETS["crop"], 0), two_views(images, PRESETS["crop"], 0)
    assert torch.equal(many.images[:100], few.images[:100]) and torch.equal(many.affines[130:230], few.affines[100:])
    by_hand = make_views(torch.from_numpy(images[100:]), PRESETS["crop"].views, generator_for(0, 100, 1))
    assert torch.equal(many.images[230:], by_hand.images) and torch.equal(many.affines[230:], by_hand.affines)


def test_noise_has_its_size_and_moves_nothing():
    grey = np.full((40, 1, 8, 8), 128, np.uint8)
    views = two_views(grey, Augmentation(name="noise", noise=0.1), 0)
    noise = views.images - 128 / 255
    assert float(noise.std()) == pytest.approx(0.1, rel=0.04) and float(noise.mean()) == pytest.approx(0, abs=0.006)
    correlation = float((noise[:40] * noise[40:]).mean()) / 0.01
    assert abs(correlation) < 0.08, "the two views have draws of their own"


def test_presets_have_their_names():
    assert set(PRESETS) == set(get_args(Preset))
    mine = Augmentation(name="mine", views=ViewSettings(shift=1))
    assert resolved("crop") is PRESETS["crop"] and resolved(mine) is mine


def test_values_by_chance():
    assert chance(8, 2) == pytest.approx({"match_top1": 1 / 8, "match_top2_ordered": 1 / 56, "match_top2_sets": 1 / 28, "chosen_iou": 5 / 28})
    assert "chosen_iou" not in chance(8, None) and chance(1, 1) == {}

"""Matches of corresponding patches in two recorded views."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.records import Layout, ModelOutput, RoutingRecord
from moecore.measure.routing_metrics.augmentations import PRESETS, two_views
from moecore.measure.routing_metrics.matching import NAMES, augmented_row, chance
from tests.routed import KINDS, tiny

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)


class ByPixel(nn.Module):
    """Each of the 4 × 4 patches of 2 × 2 pixels goes to the expert that its first pixel names:
    level e / 16 is expert e, the second is e + 1.
    """

    layout = Layout(0, (4, 4), (8, 8))

    def forward(self, images: Tensor) -> ModelOutput:
        expert = (images[:, 0, ::2, ::2].flatten(1) * 255 / 16).round().long() % 8
        probs = (
            nn.functional.one_hot(expert, 8) * 0.7
            + nn.functional.one_hot((expert + 1) % 8, 8) * 0.2
            + 0.1 / 8
        )
        chosen = nn.functional.one_hot(expert, 8).bool()
        return ModelOutput(
            images.flatten(1)[:, :2], (RoutingRecord(probs, probs, probs, chosen, probs * chosen),)
        )


def coded(count: int) -> np.ndarray:
    """Images whose every patch has one of eight levels, 0 to 7 times 16."""
    levels = np.random.default_rng(1).integers(0, 8, (count, 1, 4, 4)) * 16
    return levels.repeat(2, 2).repeat(2, 3).astype(np.uint8)


def test_partners_of_mirrored_views_are_found_through_the_affines():
    views = two_views(coded(250), PRESETS["flip"], 0)
    mirrored = (views.affines[:250] != views.affines[250:]).flatten(1).any(1)
    assert 90 < mirrored.sum() < 160, "about half of the pairs differ"
    found = augmented_row("x", ByPixel(), views, 64)
    assert (
        found.pairs == 250 * 16
        and [getattr(found, name) for name in NAMES] == [1, 1, 1]
        and found.chosen_iou == 1
    )
    unmatched = augmented_row(
        "x", ByPixel(), views._replace(affines=torch.eye(3).expand(500, 3, 3)), 64
    )
    # Half of the pairs are compared at the wrong place, where one of eight experts matches by
    # chance.
    assert unmatched.match_top1 == pytest.approx(0.5 + 0.5 / 8, abs=0.07) == unmatched.chosen_iou
    assert unmatched.independent_top1 == pytest.approx(
        1 / 8, abs=0.01
    ) and unmatched.chance_iou == pytest.approx(1 / 8)


def test_shares_by_hand():
    # Two images, the second view of the first with other levels in 4 of 16 patches, of the second
    # in 12: of 32 pairs 16 match.
    first = coded(2)
    second = first.copy()
    second[0, :, :, :2] = (second[0, :, :, :2] + 16) % 128
    second[1, :, :, :6] = (second[1, :, :, :6] + 16) % 128
    pixels = torch.from_numpy(np.concatenate([first, second])).float() / 255
    found = augmented_row(
        "x",
        ByPixel(),
        type(two_views(first, PRESETS["identity"], 0))(pixels, torch.eye(3).expand(4, 3, 3)),
        4,
    )
    assert found.pairs == 32 and [getattr(found, name) for name in NAMES] == [0.5, 0.5, 0.5]
    # Resamples of two images have 12/16, 8/16 or 4/16; reflected at 0.5 the limits stay.
    assert (found.match_top1_low, found.match_top1_high) == (0.25, 0.75)
    assert found.confidence.highest == pytest.approx(0.7125)
    assert found.confidence.second == pytest.approx(0.2125)
    assert found.confidence.others == pytest.approx(0.075)
    assert found.layers[0].confidence == found.confidence


@pytest.mark.parametrize("name", KINDS)
def test_the_same_view_twice_matches_everywhere(name):
    found = augmented_row("x", tiny(name), two_views(IMAGES, PRESETS["identity"], 0), 24)
    assert [
        getattr(found, key) for key in (*NAMES, "chosen_iou", "match_top1_low", "match_top1_high")
    ] == [1] * 6 and found.pairs == 12 * 16
    assert len(found.layers) == 2


@pytest.mark.parametrize("name", ["vmoe", "ermoe", "expert_choice"])
@pytest.mark.parametrize("kind", ["noise", "crop", "randaugment"])
def test_ratios_are_ordered_have_intervals_and_do_not_depend_on_the_batch(name, kind):
    views = two_views(IMAGES, PRESETS[kind], 3)
    found, parts = (augmented_row("x", tiny(name), views, batch) for batch in (24, 5))
    assert (
        found.match_top2_ordered <= min(found.match_top1, found.match_top2_sets)
        and found.match_top1 < 1
    )
    for key in NAMES:
        value = getattr(found, key)
        assert 0 <= getattr(found, f"{key}_low") <= value <= getattr(found, f"{key}_high") <= 1
        assert value == pytest.approx(sum(getattr(layer, key) for layer in found.layers) / 2)
        assert value == pytest.approx(getattr(parts, key))
    assert found.draws == parts.draws and 0 < found.chosen_iou < 1 and 0 < found.chance_iou < 1


def test_values_by_chance():
    found = chance(8, 2)
    assert found.match_top1 == 1 / 8
    assert found.match_top2_ordered == pytest.approx(1 / 56)
    assert found.match_top2_sets == pytest.approx(1 / 28)
    assert found.chosen_iou == pytest.approx(5 / 28)
    assert chance(8, None).chosen_iou is None
    with pytest.raises(UserError, match="at least two"):
        chance(1, 1)

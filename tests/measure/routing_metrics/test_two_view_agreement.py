"""Matches of corresponding patches in two recorded views."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moecore.core.encoded_values import decode_float_array
from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.data.views.views import ViewsWithAffines
from moecore.measure.routing_metrics.epochs import (
    agreement_items,
    agreement_over_epochs,
    match_counts_by_image,
    match_ratios,
    saturation_by_image,
)
from moecore.measure.routing_metrics.two_view_agreement import (
    NAMES,
    PRESETS,
    augmented_row,
    draw_two_views,
)
from tests.routed import tiny

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)


def shares(found: dict) -> dict[str, float]:
    """Return the means of ``augmented_row``."""
    return {name: interval.value for name, (_, interval) in found.items()}


class ByPixel(nn.Module):
    """Each of 4 × 4 patches goes to expert e, where its first pixel has level 16 e; then e + 1."""

    layouts = (TokenLayout(0, (4, 4), (8, 8)),)

    def forward(self, images: Tensor) -> ModelOutput:
        expert = (images[:, 0, ::2, ::2].flatten(1) * 255 / 16).round().long() % 8
        first, second = (nn.functional.one_hot((expert + by) % 8, 8) for by in (0, 1))
        probs = first * 0.7 + second * 0.2 + 0.1 / 8
        record = RoutingRecord(probs, probs, probs, first.bool(), probs * first)
        return ModelOutput(images.flatten(1)[:, :2], (record,))


def coded(count: int) -> np.ndarray:
    """Images whose every patch has one of eight levels, 0 to 7 times 16."""
    levels = np.random.default_rng(1).integers(0, 8, (count, 1, 4, 4)) * 16
    return levels.repeat(2, 2).repeat(2, 3).astype(np.uint8)


def test_partners_of_mirrored_views_are_found_through_the_affines():
    views = draw_two_views(coded(250), PRESETS["flip"], 0)
    mirrored = (views.affines[:250] != views.affines[250:]).flatten(1).any(1)
    assert 90 < mirrored.sum() < 160, "about half of the pairs differ"
    found = shares(augmented_row(ByPixel(), views, 64))
    assert found == {**dict.fromkeys(NAMES, 1), "switch_fraction": 0}
    still = views._replace(affines=torch.eye(3).expand(500, 3, 3))
    unmatched = shares(augmented_row(ByPixel(), still, 64))
    # Half of the pairs are at the wrong place, where one of eight experts matches by chance.
    assert unmatched["match_top1"] == pytest.approx(0.5 + 0.5 / 8, abs=0.07)


def test_items_of_epochs_by_hand():
    # Two images of one layer and two tokens: between epochs 1 and 2 they keep 1 and 2 experts,
    # between epochs 2 and 3 both and none.
    first = [np.array(of_epoch).reshape(2, 1, 2) for of_epoch in ([0, 1, 2, 3], [0, 2, 2, 3])]
    items = agreement_items([*first, np.array([[[0, 2]], [[3, 2]]])], None)
    found = {name: decode_float_array(text).tolist() for name, text in items.items()}
    assert found["consecutive_quarter"] == [0.5, 1] and found["consecutive_last"] == [1, 0]
    assert found["consecutive_mean"] == [0.75, 0.5]


def test_saturation_by_hand():
    """Fixture E1, an image of three tokens and one layer: a half of one token's pair is new."""
    before, final = np.zeros((2, 1, 1, 3, 4), dtype=bool)
    for mask, sets in ((before, [(0, 1), (2, 0), (1, 3)]), (final, [(1, 0), (2, 3), (1, 3)])):
        for token, experts in enumerate(sets):
            mask[0, 0, token, list(experts)] = True
    shares = saturation_by_image([np.packbits(one, axis=-1) for one in (before, final)])
    assert [one.item() for one in shares] == pytest.approx([0.833333, 1], abs=1e-6)


def test_shares_by_hand():
    # Two images, the second view of the first with other levels in 4 of 16 patches, of the second
    # in 12: of 32 pairs 16 match.
    first = coded(2)
    second = first.copy()
    second[0, :, :, :2] = (second[0, :, :, :2] + 16) % 128
    second[1, :, :, :6] = (second[1, :, :, :6] + 16) % 128
    pixels = torch.from_numpy(np.concatenate([first, second])).float() / 255
    found = augmented_row(ByPixel(), ViewsWithAffines(pixels, torch.eye(3).expand(4, 3, 3)), 4)
    assert [shares(found)[name] for name in NAMES] == [0.5, 0.5, 0.5]
    # Resamples of two images have 12/16, 8/16 or 4/16; reflected at 0.5 the limits stay.
    assert found["match_top1"][1].limits == (0.25, 0.75)


def test_the_same_view_twice_matches_everywhere():
    found = augmented_row(tiny("vmoe"), draw_two_views(IMAGES, PRESETS["identity"], 0), 24)
    assert [shares(found)[name] for name in NAMES] == [1] * 3
    assert found["match_top1"][1].limits == (1, 1)


@pytest.mark.parametrize(("name", "kind"), [("vmoe", "randaugment"), ("ermoe", "crop")])
def test_ratios_are_ordered_have_intervals_and_do_not_depend_on_the_batch(name, kind):
    views = draw_two_views(IMAGES, PRESETS[kind], 3)
    found, parts = (augmented_row(tiny(name), views, batch) for batch in (24, 5))
    first, ordered, sets = (shares(found)[key] for key in NAMES)
    assert ordered <= min(first, sets) and first < 1
    for key in NAMES:
        interval = found[key][1]
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert shares(found) == pytest.approx(shares(parts))


# Two best: ours always (0, 1), theirs (0, 1), (1, 0), (0, 2), (2, 1), (1, 2)
OURS = torch.tensor([0.7, 0.2, 0.1]).expand(1, 5, 3)
THEIRS = torch.tensor(
    [[[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.6, 0.1, 0.3], [0.1, 0.2, 0.7], [0.1, 0.7, 0.2]]]
)


def test_ratios_by_hand():
    """Best expert, best and second in this order, two best as a set."""
    every = torch.ones(1, 5, dtype=torch.bool)
    assert match_ratios(OURS, THEIRS, every) == [2 / 5, 1 / 5, 2 / 5]
    some = torch.tensor([[False, True, True, True, False]])
    assert match_ratios(OURS, THEIRS, some) == pytest.approx([1 / 3, 0, 1 / 3])


def test_ties_go_to_the_lowest_index():
    even = torch.full((1, 1, 40), 1 / 40)
    low, found = torch.eye(40)[0] + 0.5 * torch.eye(40)[1], torch.ones(1, 1, dtype=torch.bool)
    assert match_ratios(even, low.view(1, 1, 40), found) == [1, 1, 1]
    tied_second = torch.tensor([[[0.5, 0.1, 0.2, 0.2]]])
    for second, third, same in ((0.3, 0.2, [1, 1, 1]), (0.2, 0.3, [1, 0, 0])):
        theirs = torch.tensor([[[0.4, 0.1, second, third]]])
        assert match_ratios(tied_second, theirs, found) == same


@given(st.integers(0, 1000), st.integers(2, 5))
def test_ordered_pairs_are_rarer_than_sets_and_than_best_ones(seed, experts):
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = torch.rand(2, 3, 6, experts, generator=generator)
    found = torch.rand(3, 6, generator=generator) < 0.7
    found[0, 0] = True
    ratios = top1, top2_ordered, top2_sets = match_ratios(ours, theirs, found)
    assert 0 <= top2_ordered <= min(top1, top2_sets) and max(ratios) <= 1
    assert match_ratios(theirs, ours, found) == ratios  # the views change places
    names = torch.randperm(experts, generator=generator)
    assert match_ratios(ours[..., names], theirs[..., names], found) == ratios
    assert match_ratios(ours, ours, found) == [1, 1, 1]
    if experts == 2:
        assert top2_sets == 1 and top2_ordered == top1


def test_epochs_by_hand():
    # Four tokens over three epochs: 0 → 1 shares two tokens, 1 → 2 three, 0 with the last one.
    epochs = [np.array([[0, 1], [2, 3]]), np.array([[0, 1], [0, 0]]), np.array([[0, 2], [0, 0]])]
    assert agreement_over_epochs(epochs) == {
        "with_final": [0.25, 0.75, 1.0],
        "consecutive": [0.5, 0.75],
    }
    assert agreement_over_epochs(epochs[:1]) == {"with_final": [1.0], "consecutive": []}


def test_pairs_are_counted_image_by_image():
    ours, theirs = OURS.expand(2, -1, -1), torch.cat([THEIRS, THEIRS.roll(1, dims=1)])
    found = torch.tensor([[True, True, True, True, True], [False, True, True, False, False]])
    # Second image: theirs is (1, 2), (0, 1), (1, 0), (0, 2), (2, 1); second and third are there.
    assert match_counts_by_image(ours, theirs, found).tolist() == [[2, 1, 2], [1, 1, 2]]
    assert match_ratios(ours, theirs, found) == [3 / 7, 2 / 7, 4 / 7]


@pytest.mark.parametrize(("experts", "pairs"), [(1, True), (3, False)])
def test_matches_need_a_pair_and_two_experts(experts, pairs):
    probs = torch.ones(2, 4, experts)
    with pytest.raises(UserError, match=f"and {experts} experts; allowed: at least one pair"):
        match_ratios(probs, probs, torch.full((2, 4), pairs))

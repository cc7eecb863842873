import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moecore.core import arrays_as_text, files, routing_records
from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout, first_choices
from moecore.data.views.random_views import ViewsWithAffines
from moecore.measure.robustness import expert_overlaps
from moecore.measure.routing_metrics import epoch_routing as module
from moecore.measure.routing_metrics import expert_profiles, two_view_agreement
from moecore.measure.routing_metrics.expert_profiles import count_expert_use, parse_expert_grid
from moecore.measure.routing_metrics.layer_metrics import (
    agreement_by_image,
    below_k_eligible_flags,
    choice_iou,
    compute_confidence_by_rank,
    compute_tails_beyond_k,
    dead_expert_share,
    eligible_tail_mass,
    expert_counts,
    expert_map_border_shares,
    experts_per_token_by_image,
    inherited_share,
    load_cv2,
    max_load_violation,
    normalised_load_entropy,
)
from moecore.measure.routing_metrics.two_view_agreement import (
    MATCH_NAMES,
    PRESETS,
    average_view_match_shares,
)
from tests.measure.subjects import match_ratios
from tests.methods import tiny

SCORES = torch.tensor(
    [[[0.9, 0.6, 0.5, 0.75], [0.1, 0.8, -0.9, 0.5], [0.5, 0.4, 0.3, 0.2], [0.7, 0.0, 0.8, 0.1]]]
)
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
# Two best: ours always (0, 1), theirs (0, 1), (1, 0), (0, 2), (2, 1), (1, 2)
OURS = torch.tensor([0.7, 0.2, 0.1]).expand(1, 5, 3)
THEIRS = torch.tensor(
    [[[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.6, 0.1, 0.3], [0.1, 0.2, 0.7], [0.1, 0.7, 0.2]]]
)


def masks(*rows: str) -> torch.Tensor:
    """One image, one token a row, one expert a character."""
    return torch.tensor([[[mark == "x" for mark in row] for row in rows]])


def record(chosen: torch.Tensor, combine: torch.Tensor | None = None) -> RoutingRecord:
    weights = chosen.float() if combine is None else combine
    return RoutingRecord(weights, weights, weights, chosen, weights)


def test_counts_and_kept_choices_by_hand():
    """Fixture E1: 0 and 1 in another order, one of two, both; no choice; fewer, more."""
    assert expert_counts(masks("xx..", "x.x.")).tolist() == [2, 1, 1, 0]
    before = masks("xx..", "x.x.", ".x.x", "....", "x...", "xx..", "x...")
    after = masks("xx..", "..xx", ".x.x", "....", "....", "x...", "xx..")
    kept = inherited_share(before, after)[0]
    assert kept.tolist() == [1, 0.5, 1, 1, 0, 1, 0.5]
    assert 1 - float(kept[:3].mean()) == pytest.approx(0.166667, abs=1e-6)


def test_places_and_kinds_by_hand():
    """Two images of a class token, of no kind, and two patches; expert 2 is nobody's."""
    chosen = torch.cat([masks("x..", "xx.", "x.."), masks("x..", ".x.", "xx.")])
    kinds = torch.tensor([[0, 1, 2], [0, 1, 1]])[..., None] == torch.tensor([1, 2])
    use = count_expert_use(record(chosen), 1, kinds)
    assert use.at_place[0].tolist() == [[1, 2, 0], [2, 1, 0]]
    assert use.of_kind[0].tolist() == [[2, 3, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("counts", "cv2", "entropy"),
    [
        ([5, 5, 5, 5], 0.0, 1.0),
        ([20, 0, 0, 0], 3.0, 0.0),  # E − 1
        ([10, 10, 0, 0], 1.0, 0.5),  # ln 2 / ln 4
        ([3, 1], 0.25, 0.75 * math.log2(4 / 3) + 0.25 * 2),  # population: variance 1, mean 2
        ([7], 0.0, 1.0),
    ],
)
def test_load_and_entropy_by_hand(counts, cv2, entropy):
    counts = torch.tensor(counts)
    assert load_cv2(counts) == pytest.approx(cv2)
    assert normalised_load_entropy(counts) == pytest.approx(entropy)


def test_load_choices_confidence_and_agreement_by_hand():
    # The mean load is 30; 1 is under a tenth of it but not under a hundredth
    counts = torch.tensor([60, 30, 29, 1])
    assert max_load_violation(counts) == 1
    assert dead_expert_share(counts, 0.1) == 0.25 and dead_expert_share(counts) == 0
    # One image's tokens chose 2, 1, 0 and 1 experts; the other's one each
    chosen = torch.zeros(2, 4, 3, dtype=torch.bool)
    chosen[0, [0, 0, 1, 3], [0, 1, 1, 2]] = True
    chosen[1, :, 0] = True
    found = experts_per_token_by_image(chosen)
    assert found["experts_per_token"].tolist() == [1, 1] and found["unrouted"].tolist() == [0.25, 0]
    probs = torch.tensor([[[0.7, 0.1, 0.2, 0.0], [0.1, 0.3, 0.1, 0.5]]])
    assert [*compute_confidence_by_rank(probs).values()] == pytest.approx((0.6, 0.25, 0.15))
    assert [*compute_confidence_by_rank(torch.ones(1, 2, 1)).values()] == [1, 0, 0]
    ours = torch.tensor([[0, 0, 1, -1], [0, 1, 1, -1]])
    theirs = torch.tensor([[0, 0, 0, 1], [0, 1, 1, -1]])
    assert agreement_by_image(ours, theirs).tolist() == [0.5, 1.0]
    with pytest.raises(files.UserError, match="token by token"):
        agreement_by_image(ours, theirs[:, :2])


def test_the_first_choice_is_the_most_probable_of_the_chosen():
    """A bias took expert 0 from the first token; the second's tie goes to the lowest index."""
    probs = torch.tensor([[[0.6, 0.1, 0.3], [0.2, 0.4, 0.4], [0.5, 0.3, 0.2]]])
    chosen = torch.tensor([[[False, True, True], [False, True, True], [False, False, False]]])
    record = RoutingRecord(probs.log(), probs, chosen.float(), chosen, probs * chosen)
    assert first_choices(record).tolist() == [[2, 1, -1]]
    scores = routing_records.raise_scores_of_chosen(record.logits, chosen)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    assert order.tolist() == [[[2, 1, 0], [1, 2, 0], [0, 1, 2]]]


def test_iou_by_hand_and_changes_under_capacity():
    before = masks("xx..", "xx..", "xx..", "....", "....", "xx..")
    after = masks("xx..", "x.x.", "..xx", "....", "x...", "x...")
    assert choice_iou(before, after)[0].tolist() == pytest.approx([1, 1 / 3, 0, 1, 0, 0.5])
    # The second token lost expert 2
    chosen = masks("xx..", "x.x.")
    weights = torch.tensor([[[0.6, 0.4, 0, 0], [0.7, 0, 0, 0]]])
    overlaps = expert_overlaps((record(chosen),), (record(chosen, weights),))
    assert [float(1 - iou.mean()) for (iou,) in overlaps.values()] == [0.0, 0.25]


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_overlays_skip_the_tokens_before_the_patches(prefix):
    images = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    combine = torch.zeros(1, prefix + 9, 12)
    for patch in range(8):  # the last patch is dropped
        combine[0, prefix + patch, patch + 3] = 0.5
        combine[0, prefix + patch, 0] = 0.1
    stored = expert_profiles.encode_expert_overlays(images, (record(combine > 0, combine),))
    assert stored.grids == ((("3 4 5", "6 7 8", "9 10 -"),),) and stored.experts == 12
    assert parse_expert_grid(stored.grids[0][0]).tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, -1]]
    assert np.array_equal(stored.images(), images)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_load_and_entropy_have_bounds_that_collapse_and_balance_reach(counts):
    experts, given_counts = len(counts), torch.tensor(counts)
    assert -1e-12 <= load_cv2(given_counts) <= experts - 1 + 1e-9
    assert -1e-12 <= normalised_load_entropy(given_counts) <= 1 + 1e-12
    one = torch.zeros(experts, dtype=torch.long)
    one[experts // 2] = 7
    assert load_cv2(one) == pytest.approx(experts - 1) and load_cv2(torch.full((experts,), 3)) == 0
    slow = sum(c * c for c in counts) / experts / (sum(counts) / experts) ** 2 - 1
    assert load_cv2(given_counts) == pytest.approx(slow, abs=1e-9)


def test_places_on_the_map_by_hand():
    """16 experts on a map of 4 × 4: 0 3 12 15 are the corners; 5 6 9 10 lie inside."""
    load, mass = torch.zeros(2, 16, dtype=torch.float64)
    load[[0, 3, 4, 10]], mass[[5, 1]] = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), 0.5
    expected = {"border": (0.6, 0.5, 0.75), "corner": (0.3, 0, 0.25), "inner": (0.4, 0.5, 0.25)}
    found = expert_map_border_shares(load, mass)
    assert len(found) == 9
    for place, values in expected.items():
        names = [f"{place}_{name}" for name in ("load", "mass", "cells")]
        assert [found[name] for name in names] == pytest.approx(values)


@pytest.mark.parametrize(("experts", "corners"), [(8, 4 / 8), (7, 2 / 7), (4, 1.0), (1, 1.0)])
def test_a_narrow_map_is_all_border(experts, corners):
    even = torch.full((experts,), 1 / experts, dtype=torch.float64)
    found = expert_map_border_shares(even, even)
    assert found["border_load"] == pytest.approx(1)
    assert found["corner_cells"] == pytest.approx(corners)
    assert not [name for name in found if name.startswith("inner")]


# One image, four tokens; above 0.5 are three, one, none and two scores (0.5 itself is not above).
def fallback_rate(scores: torch.Tensor, threshold: float) -> float:
    return float(below_k_eligible_flags(scores, threshold, 1).mean())


@st.composite
def scores(draw, lowest=-1.0, width=32):
    tokens, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    values, number = st.floats(lowest, 1, width=width), tokens * experts
    drawn = draw(st.lists(values, min_size=number, max_size=number))
    return torch.tensor(drawn).view(1, tokens, experts)


def slow_tail_mass(scores, threshold, k):
    """Eq. 12, token by token."""
    masses = []
    for token in scores.flatten(0, 1).tolist():
        weights = sorted((max(s, 1e-6) for s in token if s > threshold), reverse=True)
        if weights:
            masses.append(sum(weights[k:]) / sum(weights))
    return sum(masses) / len(masses) if masses else None


def test_rates_by_hand():
    assert fallback_rate(SCORES, 0.5) == 0.25
    rates = [float(below_k_eligible_flags(SCORES, 0.5, k).mean()) for k in (1, 2, 3, 4)]
    assert rates == [0.25, 0.5, 0.75, 1.0]
    assert fallback_rate(SCORES, -1.0) == 0 and fallback_rate(SCORES, 0.9) == 1
    assert fallback_rate(SCORES.expand(3, -1, -1), 0.5) == 0.25  # images count alike


def test_tail_mass_by_hand():
    # k = 2, tokens 0, 1 and 3: 0.6/(0.9 + 0.75 + 0.6) = 4/15, 0 and 0. Token 2 has no eligible
    # expert and does not count.
    assert eligible_tail_mass(SCORES, 0.5, 2) == pytest.approx(4 / 15 / 3)
    # k = 1: (0.75 + 0.6)/2.25 = 0.6, 0, 0.7/1.5.
    assert eligible_tail_mass(SCORES, 0.5, 1) == pytest.approx((0.6 + 0.7 / 1.5) / 3)
    assert eligible_tail_mass(SCORES, 0.9, 1) is None
    # A negative threshold lets in scores that count 1e-6: 1e-6/(0.4 + 1e-6).
    found = eligible_tail_mass(torch.tensor([[[-0.2, 0.4, -0.8]]]), -0.5, 1)
    assert found == pytest.approx(1e-6 / 0.400001)


@given(scores(), st.floats(-1, 1, width=32), st.integers(1, 6))
@settings(deadline=None)
def test_bounds_and_definition(scores, threshold, k):
    sizes, mass = (scores > threshold).sum(-1), eligible_tail_mass(scores, threshold, k)
    assert (mass is None) == (fallback_rate(scores, threshold) == 1)
    assert mass == (None if mass is None else pytest.approx(slow_tail_mass(scores, threshold, k)))
    if mass is not None:
        assert 0 <= mass < 1 and (mass == 0) == bool((sizes <= k).all())
    assert fallback_rate(scores, threshold) <= below_k_eligible_flags(scores, threshold, k).mean()
    relabelled = eligible_tail_mass(scores.flip(-1), threshold, k)
    assert relabelled == (None if mass is None else pytest.approx(mass))


def test_tail_of_probs_by_hand():
    # Sorted 0.6, 0.3, 0.1, 0 and four quarters.
    probs = torch.tensor([[[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    masses = [(0.4 + 0.75) / 2, (0.1 + 0.5) / 2, 0.125, 0, 0]
    assert [
        float(compute_tails_beyond_k(probs, k).mean()) for k in (1, 2, 3, 4, 9)
    ] == pytest.approx(masses)


@given(scores(0.001, width=64), st.integers(1, 7))
@settings(deadline=None)
def test_bounds_of_the_tail_of_probs(weights, k):
    probs = weights / weights.sum(-1, keepdim=True)
    experts = probs.shape[-1]
    mass, largest = float(compute_tails_beyond_k(probs, k).mean()), max(0, 1 - k / experts)
    assert 0 <= mass <= largest + 1e-12 and (mass == 0) == (k >= experts)
    assert float(compute_tails_beyond_k(torch.ones(1, 2, experts), k).mean()) == pytest.approx(
        largest
    )
    assert float(compute_tails_beyond_k(probs, k + 1).mean()) <= mass, (
        "more experts leave less outside"
    )
    assert float(compute_tails_beyond_k(probs.flip(-1), k).mean()) == pytest.approx(mass), (
        "relabelled"
    )
    # eq. 12 where every expert is eligible
    assert eligible_tail_mass(probs, 0.0, k) == pytest.approx(mass)


def shares(found: dict) -> dict[str, float]:
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
    views = two_view_agreement.draw_two_views(coded(250), PRESETS["flip"], 0)
    mirrored = (views.affines[:250] != views.affines[250:]).flatten(1).any(1)
    assert 90 < mirrored.sum() < 160, "about half of the pairs differ"
    found = shares(average_view_match_shares(ByPixel(), views, 64))
    assert found == {**dict.fromkeys(MATCH_NAMES, 1), "switch_fraction": 0}
    still = views._replace(affines=torch.eye(3).expand(500, 3, 3))
    unmatched = shares(average_view_match_shares(ByPixel(), still, 64))
    # Half of the pairs are at the wrong place, where one of eight experts matches by chance.
    assert unmatched["match_top1"] == pytest.approx(0.5 + 0.5 / 8, abs=0.07)


def test_items_of_epochs_by_hand():
    # Two images of one layer and two tokens: between epochs 1 and 2 they keep 1 and 2 experts,
    # between epochs 2 and 3 both and none.
    first = [np.array(of_epoch).reshape(2, 1, 2) for of_epoch in ([0, 1, 2, 3], [0, 2, 2, 3])]
    items = module.encode_agreement_of_epochs([*first, np.array([[[0, 2]], [[3, 2]]])], None)
    found = {name: arrays_as_text.decode_float_array(text).tolist() for name, text in items.items()}
    assert found["consecutive_quarter"] == [0.5, 1] and found["consecutive_last"] == [1, 0]
    assert found["consecutive_mean"] == [0.75, 0.5]


def test_saturation_by_hand():
    """Fixture E1, an image of three tokens and one layer: a half of one token's pair is new."""
    before, final = np.zeros((2, 1, 1, 3, 4), dtype=bool)
    for mask, sets in ((before, [(0, 1), (2, 0), (1, 3)]), (final, [(1, 0), (2, 3), (1, 3)])):
        for token, experts in enumerate(sets):
            mask[0, 0, token, list(experts)] = True
    shares = module.saturation_by_image([np.packbits(one, axis=-1) for one in (before, final)])
    assert [one.item() for one in shares] == pytest.approx([0.833333, 1], abs=1e-6)


def test_shares_by_hand():
    # Two images, the second view of the first with other levels in 4 of 16 patches, of the second
    # in 12: of 32 pairs 16 match.
    first = coded(2)
    second = first.copy()
    second[0, :, :, :2] = (second[0, :, :, :2] + 16) % 128
    second[1, :, :, :6] = (second[1, :, :, :6] + 16) % 128
    pixels = torch.from_numpy(np.concatenate([first, second])).float() / 255
    found = average_view_match_shares(
        ByPixel(), ViewsWithAffines(pixels, torch.eye(3).expand(4, 3, 3)), 4
    )
    assert [shares(found)[name] for name in MATCH_NAMES] == [0.5, 0.5, 0.5]
    # Resamples of two images have 12/16, 8/16 or 4/16; reflected at 0.5 the limits stay.
    assert found["match_top1"][1].limits == (0.25, 0.75)


def test_the_same_view_twice_matches_everywhere():
    views = two_view_agreement.draw_two_views(IMAGES, PRESETS["identity"], 0)
    found = average_view_match_shares(tiny("vmoe"), views, 24)
    assert [shares(found)[name] for name in MATCH_NAMES] == [1] * 3
    assert found["match_top1"][1].limits == (1, 1)


@pytest.mark.parametrize(("name", "kind"), [("vmoe", "randaugment"), ("ermoe", "crop")])
def test_ratios_are_ordered_have_intervals_and_do_not_depend_on_the_batch(name, kind):
    views = two_view_agreement.draw_two_views(IMAGES, PRESETS[kind], 3)
    found, parts = (average_view_match_shares(tiny(name), views, batch) for batch in (24, 5))
    first, ordered, sets = (shares(found)[key] for key in MATCH_NAMES)
    assert ordered <= min(first, sets) and first < 1
    for key in MATCH_NAMES:
        interval = found[key][1]
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert shares(found) == pytest.approx(shares(parts))


def test_ratios_by_hand_and_ties_go_to_the_lowest_index():
    # Best expert, best and second in this order, two best as a set
    assert match_ratios(OURS, THEIRS, torch.ones(1, 5, dtype=torch.bool)) == [2 / 5, 1 / 5, 2 / 5]
    some = torch.tensor([[False, True, True, True, False]])
    assert match_ratios(OURS, THEIRS, some) == pytest.approx([1 / 3, 0, 1 / 3])
    even = torch.full((1, 1, 40), 1 / 40)
    low, found = torch.eye(40)[0] + 0.5 * torch.eye(40)[1], torch.ones(1, 1, dtype=torch.bool)
    assert match_ratios(even, low.view(1, 1, 40), found) == [1, 1, 1]
    tied_second = torch.tensor([[[0.5, 0.1, 0.2, 0.2]]])
    for second, third, same in ((0.3, 0.2, [1, 1, 1]), (0.2, 0.3, [1, 0, 0])):
        assert match_ratios(tied_second, torch.tensor([[[0.4, 0.1, second, third]]]), found) == same


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


def test_epochs_and_pairs_by_hand():
    # Four tokens over three epochs: 0 → 1 shares two tokens, 1 → 2 three, 0 with the last one.
    epochs = [np.array([[0, 1], [2, 3]]), np.array([[0, 1], [0, 0]]), np.array([[0, 2], [0, 0]])]
    expected = {"with_final": [0.25, 0.75, 1.0], "consecutive": [0.5, 0.75]}
    assert module.compare_with_final_and_next(epochs) == expected
    assert module.compare_with_final_and_next(epochs[:1]) == {
        "with_final": [1.0],
        "consecutive": [],
    }
    ours, theirs = OURS.expand(2, -1, -1), torch.cat([THEIRS, THEIRS.roll(1, dims=1)])
    found = torch.tensor([[True, True, True, True, True], [False, True, True, False, False]])
    # Second image: theirs is (1, 2), (0, 1), (1, 0), (0, 2), (2, 1); second and third are there.
    assert module.count_token_pair_matches_by_image(ours, theirs, found).tolist() == [
        [2, 1, 2],
        [1, 1, 2],
    ]
    assert match_ratios(ours, theirs, found) == [3 / 7, 2 / 7, 4 / 7]


@pytest.mark.parametrize(("experts", "pairs"), [(1, True), (3, False)])
def test_matches_need_a_pair_and_two_experts(experts, pairs):
    probs = torch.ones(2, 4, experts)
    with pytest.raises(files.UserError, match=f"and {experts} experts; allowed: at least one pair"):
        match_ratios(probs, probs, torch.full((2, 4), pairs))

"""Use of experts, by hand; eligibility: fallback, too few eligible experts, and what top-k
cuts off.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, chosen_first_scores, first_choices
from moecore.measure.exploring.expert_gallery import expert_use_by_image
from moecore.measure.exploring.expert_overlays import encode_expert_overlays, parse_expert_grid
from moecore.measure.routing_metrics.layer_metrics import (
    agreement_by_image,
    below_k_eligible_flags,
    choice_iou,
    choices_by_image,
    dead_expert_share,
    eligible_tail_mass,
    expert_counts,
    fallback_rate,
    kept_choices,
    load_cv2,
    map_border_shares,
    max_load_violation,
    normalised_load_entropy,
    processing_change_by_layer,
    routing_change_by_layer,
    routing_confidence,
    tail_of_probs,
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
    kept = kept_choices(before, after)[0]
    assert kept.tolist() == [1, 0.5, 1, 1, 0, 1, 0.5]
    assert 1 - float(kept[:3].mean()) == pytest.approx(0.166667, abs=1e-6)


def test_places_and_kinds_by_hand():
    """Two images of a class token, of no kind, and two patches; expert 2 is nobody's."""
    chosen = torch.cat([masks("x..", "xx.", "x.."), masks("x..", ".x.", "xx.")])
    kinds = torch.tensor([[0, 1, 2], [0, 1, 1]])[..., None] == torch.tensor([1, 2])
    use = expert_use_by_image(record(chosen), 1, kinds)
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


def test_violation_and_dead_experts_by_hand():
    """The mean load is 30; 1 is under a tenth of it but not under a hundredth."""
    counts = torch.tensor([60, 30, 29, 1])
    assert max_load_violation(counts) == 1
    assert dead_expert_share(counts, 0.1) == 0.25 and dead_expert_share(counts) == 0


def test_choices_a_token_by_hand():
    """One image's tokens chose 2, 1, 0 and 1 experts; the other's one each."""
    chosen = torch.zeros(2, 4, 3, dtype=torch.bool)
    chosen[0, [0, 0, 1, 3], [0, 1, 1, 2]] = True
    chosen[1, :, 0] = True
    found = choices_by_image(chosen)
    assert found["experts_per_token"].tolist() == [1, 1]
    assert found["unrouted"].tolist() == [0.25, 0]


def test_confidence_by_hand():
    probs = torch.tensor([[[0.7, 0.1, 0.2, 0.0], [0.1, 0.3, 0.1, 0.5]]])
    assert [*routing_confidence(probs).values()] == pytest.approx((0.6, 0.25, 0.15))
    assert [*routing_confidence(torch.ones(1, 2, 1)).values()] == [1, 0, 0]


def test_agreement_by_hand():
    ours = torch.tensor([[0, 0, 1, -1], [0, 1, 1, -1]])
    theirs = torch.tensor([[0, 0, 0, 1], [0, 1, 1, -1]])
    assert agreement_by_image(ours, theirs).tolist() == [0.5, 1.0]
    with pytest.raises(UserError, match="token by token"):
        agreement_by_image(ours, theirs[:, :2])


def test_the_first_choice_is_the_most_probable_of_the_chosen():
    """A bias took expert 0 from the first token; the second's tie goes to the lowest index."""
    probs = torch.tensor([[[0.6, 0.1, 0.3], [0.2, 0.4, 0.4], [0.5, 0.3, 0.2]]])
    chosen = torch.tensor([[[False, True, True], [False, True, True], [False, False, False]]])
    record = RoutingRecord(probs.log(), probs, chosen.float(), chosen, probs * chosen)
    assert first_choices(record).tolist() == [[2, 1, -1]]
    order = chosen_first_scores(record.logits, chosen).argsort(dim=-1, descending=True, stable=True)
    assert order.tolist() == [[[2, 1, 0], [1, 2, 0], [0, 1, 2]]]


def test_iou_by_hand():
    before = masks("xx..", "xx..", "xx..", "....", "....", "xx..")
    after = masks("xx..", "x.x.", "..xx", "....", "x...", "x...")
    expected = [1, 1 / 3, 0, 1, 0, 0.5]
    assert choice_iou(before, after)[0].tolist() == pytest.approx(expected)


def test_change_of_choice_and_of_processing_differ_under_capacity():
    """The second token lost expert 2."""
    chosen = masks("xx..", "x.x.")
    weights = torch.tensor([[[0.6, 0.4, 0, 0], [0.7, 0, 0, 0]]])
    full = record(chosen)
    assert routing_change_by_layer([full], [record(chosen, weights)]) == [0.0]
    assert processing_change_by_layer([full], [record(chosen, weights)]) == [0.25]
    assert routing_change_by_layer((), ()) == []


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_overlays_skip_the_tokens_before_the_patches(prefix):
    images = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    combine = torch.zeros(1, prefix + 9, 12)
    for patch in range(8):  # the last patch is dropped
        combine[0, prefix + patch, patch + 3] = 0.5
        combine[0, prefix + patch, 0] = 0.1
    stored = encode_expert_overlays(images, (record(combine > 0, combine),))
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
    # Slow: mean of squares / square of mean − 1.
    slow = sum(c * c for c in counts) / experts / (sum(counts) / experts) ** 2 - 1
    assert load_cv2(given_counts) == pytest.approx(slow, abs=1e-9)


def test_places_on_the_map_by_hand():
    """16 experts on a map of 4 × 4: 0 3 12 15 are the corners; 5 6 9 10 lie inside."""
    load, mass = torch.zeros(2, 16, dtype=torch.float64)
    load[[0, 3, 4, 10]], mass[[5, 1]] = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), 0.5
    expected = {"border": (0.6, 0.5, 0.75), "corner": (0.3, 0, 0.25), "inner": (0.4, 0.5, 0.25)}
    found = map_border_shares(load, mass)
    assert len(found) == 9
    for place, values in expected.items():
        names = [f"{place}_{name}" for name in ("load", "mass", "cells")]
        assert [found[name] for name in names] == pytest.approx(values)


@pytest.mark.parametrize(("experts", "corners"), [(8, 4 / 8), (7, 2 / 7), (4, 1.0), (1, 1.0)])
def test_a_narrow_map_is_all_border(experts, corners):
    even = torch.full((experts,), 1 / experts, dtype=torch.float64)
    found = map_border_shares(even, even)
    assert found["border_load"] == pytest.approx(1)
    assert found["corner_cells"] == pytest.approx(corners)
    assert not [name for name in found if name.startswith("inner")]


# One image, four tokens; above 0.5 are three, one, none and two scores (0.5 itself is not above).
SCORES = torch.tensor(
    [[[0.9, 0.6, 0.5, 0.75], [0.1, 0.8, -0.9, 0.5], [0.5, 0.4, 0.3, 0.2], [0.7, 0.0, 0.8, 0.1]]]
)


@st.composite
def scores(draw, lowest=-1.0, width=32):
    """One image of some tokens and experts."""
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
    # relabelled experts
    relabelled = eligible_tail_mass(scores.flip(-1), threshold, k)
    assert relabelled == (None if mass is None else pytest.approx(mass))


def test_tail_of_probs_by_hand():
    # Sorted 0.6, 0.3, 0.1, 0 and four quarters.
    probs = torch.tensor([[[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    expected = [(0.4 + 0.75) / 2, (0.1 + 0.5) / 2, 0.125, 0, 0]
    assert [tail_of_probs(probs, k) for k in (1, 2, 3, 4, 9)] == pytest.approx(expected)


@given(scores(0.001, width=64), st.integers(1, 7))
@settings(deadline=None)
def test_bounds_of_the_tail_of_probs(weights, k):
    probs = weights / weights.sum(-1, keepdim=True)
    experts = probs.shape[-1]
    mass, largest = tail_of_probs(probs, k), max(0, 1 - k / experts)
    assert 0 <= mass <= largest + 1e-12 and (mass == 0) == (k >= experts)
    assert tail_of_probs(torch.ones(1, 2, experts), k) == pytest.approx(largest)
    assert tail_of_probs(probs, k + 1) <= mass, "more experts leave less outside"
    assert tail_of_probs(probs.flip(-1), k) == pytest.approx(mass), "relabelled experts"
    # eq. 12 where every expert is eligible
    assert eligible_tail_mass(probs, 0.0, k) == pytest.approx(mass)

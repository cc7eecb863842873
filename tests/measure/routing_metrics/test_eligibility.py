"""Eligibility: fallback, too few eligible experts, and the weight that top-k cuts off."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.measure.routing_metrics.eligibility import (
    below_k_rate,
    fallback_rate,
    tail_mass,
    tail_of_probs,
    unchosen_mass,
)

# One image, four tokens; above 0.5 are three, one, none and two scores (0.5 itself is not above).
SCORES = torch.tensor(
    [[[0.9, 0.6, 0.5, 0.75], [0.1, 0.8, -0.9, 0.5], [0.5, 0.4, 0.3, 0.2], [0.7, 0.0, 0.8, 0.1]]]
)


@st.composite
def scores(draw):
    tokens, experts = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    values = draw(
        st.lists(st.floats(-1, 1, width=32), min_size=tokens * experts, max_size=tokens * experts)
    )
    return torch.tensor(values).view(1, tokens, experts)


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
    assert [below_k_rate(SCORES, 0.5, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert fallback_rate(SCORES, -1.0) == 0 and fallback_rate(SCORES, 0.9) == 1
    assert fallback_rate(SCORES.expand(3, -1, -1), 0.5) == 0.25  # images count alike


def test_tail_mass_by_hand():
    # k = 2, tokens 0, 1 and 3: 0.6/(0.9 + 0.75 + 0.6) = 4/15, 0 and 0. Token 2 has no eligible
    # expert and does not count.
    assert tail_mass(SCORES, 0.5, 2) == pytest.approx(4 / 15 / 3)
    # k = 1: (0.75 + 0.6)/2.25 = 0.6, 0, 0.7/1.5.
    assert tail_mass(SCORES, 0.5, 1) == pytest.approx((0.6 + 0.7 / 1.5) / 3)
    assert tail_mass(SCORES, 0.9, 1) is None
    # A negative threshold lets in scores that count 1e-6: 1e-6/(0.4 + 1e-6).
    assert tail_mass(torch.tensor([[[-0.2, 0.4, -0.8]]]), -0.5, 1) == pytest.approx(1e-6 / 0.400001)


@given(scores(), st.floats(-1, 1, width=32), st.integers(1, 6))
@settings(deadline=None)
def test_bounds_and_definition(scores, threshold, k):
    sizes, mass = (scores > threshold).sum(-1), tail_mass(scores, threshold, k)
    assert (mass is None) == (fallback_rate(scores, threshold) == 1)
    assert mass == (None if mass is None else pytest.approx(slow_tail_mass(scores, threshold, k)))
    assert mass is None or 0 <= mass < 1
    assert mass is None or (mass == 0) == bool((sizes <= k).all())
    assert (
        fallback_rate(scores, threshold)
        == below_k_rate(scores, threshold, 1)
        <= below_k_rate(scores, threshold, k)
        <= 1
    )
    order = torch.arange(scores.shape[-1]).flip(0)
    # relabelled experts
    assert tail_mass(scores[..., order], threshold, k) == (
        None if mass is None else pytest.approx(mass)
    )


def test_no_token_is_refused():
    masses = (
        lambda s: tail_mass(s, 0.5, 2),
        lambda s: tail_of_probs(s, 2),
        lambda s: unchosen_mass(s, s > 0),
    )
    for metric in (lambda s: fallback_rate(s, 0.5), lambda s: below_k_rate(s, 0.5, 2), *masses):
        with pytest.raises(UserError, match=r"(scores|probs) of shape \(1, 0, 4\)"):
            metric(torch.zeros(1, 0, 4))


@st.composite
def token_probs(draw):
    tokens, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    values = draw(
        st.lists(st.floats(0.001, 1), min_size=tokens * experts, max_size=tokens * experts)
    )
    probs = torch.tensor(values).view(1, tokens, experts)
    return probs / probs.sum(-1, keepdim=True)


PROBS = torch.tensor([[[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]]])


def test_tail_of_probs_by_hand():
    # Sorted 0.6, 0.3, 0.1, 0 and four quarters.
    assert [tail_of_probs(PROBS, k) for k in (1, 2, 3, 4, 9)] == pytest.approx(
        [(0.4 + 0.75) / 2, (0.1 + 0.5) / 2, 0.125, 0, 0]
    )
    chosen = torch.tensor([[[True, True, False, False], [False, False, False, False]]])
    assert unchosen_mass(PROBS, chosen) == pytest.approx((0.3 + 1) / 2) and unchosen_mass(
        PROBS, ~chosen
    ) == pytest.approx(0.7 / 2)


@given(token_probs(), st.integers(1, 7), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_bounds_of_the_tail_of_probs(probs, k, random):
    experts = probs.shape[-1]
    mass = tail_of_probs(probs, k)
    assert 0 <= mass <= max(0, 1 - k / experts) + 1e-12
    assert (mass == 0) == (k >= experts) and tail_of_probs(
        torch.ones(1, 2, experts), k
    ) == pytest.approx(max(0, 1 - k / experts))
    assert tail_of_probs(probs, k + 1) <= mass, "more experts leave less outside"
    order = torch.tensor(random.sample(range(experts), experts))
    assert tail_of_probs(probs[..., order], k) == pytest.approx(mass), "relabelled experts"
    assert tail_mass(probs, 0.0, k) == pytest.approx(mass), "eq. 12 where every expert is eligible"
    best = torch.zeros_like(probs, dtype=torch.bool).scatter(
        -1, probs.argsort(-1, descending=True)[..., :k], True
    )
    assert unchosen_mass(probs, best) == pytest.approx(mass, abs=1e-12)
    some = torch.zeros_like(best).scatter(-1, order[:k].expand(*probs.shape[:-1], -1), True)
    assert mass - 1e-12 <= unchosen_mass(probs, some) <= 1

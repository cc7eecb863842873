from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.measure.routing_metrics.consistency import (
    Matches,
    chance_matches,
    epoch_agreement,
    epoch_agreement_by_layer,
    independent_top1,
    match_ratios,
    matched_pairs,
)

OURS = torch.tensor(
    [[[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]]
)
THEIRS = torch.tensor(
    [[[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.6, 0.1, 0.3], [0.1, 0.2, 0.7], [0.1, 0.7, 0.2]]]
)
# Two best, ours always (0, 1); theirs:  (0, 1)     (1, 0)           (0, 2)           (2, 1)
# (1, 2)


def test_ratios_by_hand():
    assert match_ratios(OURS, THEIRS, torch.ones(1, 5, dtype=torch.bool)) == Matches(
        2 / 5, 1 / 5, 2 / 5
    )
    assert match_ratios(
        OURS, THEIRS, torch.tensor([[False, True, True, True, False]])
    ) == pytest.approx(Matches(1 / 3, 0, 1 / 3))


def test_ties_go_to_the_lowest_index():
    even = torch.full((1, 1, 40), 1 / 40)
    low, found = torch.eye(40)[0] + 0.5 * torch.eye(40)[1], torch.ones(1, 1, dtype=torch.bool)
    assert match_ratios(even, low.view(1, 1, 40), found) == Matches(1, 1, 1)
    tied_second = torch.tensor([[[0.5, 0.1, 0.2, 0.2]]])
    assert match_ratios(tied_second, torch.tensor([[[0.4, 0.1, 0.3, 0.2]]]), found) == Matches(
        1, 1, 1
    )
    assert match_ratios(tied_second, torch.tensor([[[0.4, 0.1, 0.2, 0.3]]]), found) == Matches(
        1, 0, 0
    )


@given(st.integers(0, 1000), st.integers(2, 5))
def test_ordered_pairs_are_rarer_than_sets_and_than_best_ones(seed, experts):
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = torch.rand(2, 3, 6, experts, generator=generator)
    found = torch.rand(3, 6, generator=generator) < 0.7
    found[0, 0] = True
    ratios = match_ratios(ours, theirs, found)
    assert 0 <= ratios.top2_ordered <= min(ratios.top1, ratios.top2_sets) and max(ratios) <= 1
    assert match_ratios(theirs, ours, found) == ratios  # the views change places
    names = torch.randperm(experts, generator=generator)
    assert match_ratios(ours[..., names], theirs[..., names], found) == ratios
    assert match_ratios(ours, ours, found) == (1, 1, 1)
    if experts == 2:
        assert ratios.top2_sets == 1 and ratios.top2_ordered == ratios.top1


@pytest.mark.parametrize(
    ("ours", "theirs", "found", "message"),
    [
        ((1, 2, 3), (1, 2, 3), torch.zeros(1, 2, dtype=torch.bool), "0 pairs and 3 experts"),
        ((1, 2, 1), (1, 2, 1), torch.ones(1, 2, dtype=torch.bool), "2 pairs and 1 experts"),
        ((1, 2, 3), (1, 3, 3), torch.ones(1, 2, dtype=torch.bool), "probs of shape"),
        ((1, 2, 3), (1, 2, 3), torch.ones(1, 3, dtype=torch.bool), "probs of shape"),
    ],
)
def test_nothing_to_compare_is_refused(ours, theirs, found, message):
    with pytest.raises(UserError, match=message):
        match_ratios(torch.zeros(ours), torch.zeros(theirs), found)


def test_epochs_by_hand():
    # Four tokens over three epochs: 0 → 1 shares two tokens, 1 → 2 three, 0 with the last one.
    epochs = [np.array([[0, 1], [2, 3]]), np.array([[0, 1], [0, 0]]), np.array([[0, 2], [0, 0]])]
    assert epoch_agreement(epochs) == {"with_final": [0.25, 0.75, 1.0], "consecutive": [0.5, 0.75]}
    assert epoch_agreement(epochs[:1]) == {"with_final": [1.0], "consecutive": []}


@pytest.mark.parametrize(
    "epochs",
    [[], [np.zeros((0, 3), dtype=int)], [np.zeros((2, 3), dtype=int), np.zeros((3, 2), dtype=int)]],
)
def test_epochs_that_cannot_be_compared_are_refused(epochs):
    with pytest.raises(UserError, match="needed: at least one epoch, all of one shape"):
        epoch_agreement(epochs)


def test_pairs_are_counted_image_by_image():
    ours, theirs = OURS.expand(2, -1, -1), torch.cat([THEIRS, THEIRS.roll(1, dims=1)])
    found = torch.tensor([[True, True, True, True, True], [False, True, True, False, False]])
    # Second image: theirs is (1, 2), (0, 1), (1, 0), (0, 2), (2, 1), of which the second and the
    # third are there.
    assert matched_pairs(ours, theirs, found).tolist() == [[2, 1, 2], [1, 1, 2]]
    assert match_ratios(ours, theirs, found) == Matches(3 / 7, 2 / 7, 4 / 7)


@pytest.mark.parametrize("experts", [2, 3, 5])
def test_chance_by_counting_all_choices(experts):
    choices = list(permutations(range(experts), 2))  # first and second expert, all equally likely
    pairs = list(product(choices, choices))
    shares = [
        sum(same(a, b) for a, b in pairs) / len(pairs)
        for same in (lambda a, b: a[0] == b[0], lambda a, b: a == b, lambda a, b: set(a) == set(b))
    ]
    assert chance_matches(experts) == pytest.approx(shares)
    assert chance_matches(8) == pytest.approx((1 / 8, 1 / 56, 1 / 28))
    with pytest.raises(UserError, match="1 experts; needed: at least two"):
        chance_matches(1)


def test_independent_matches_by_hand():
    # Best experts: ours 0, 0, 0, 1; theirs 0, 1, 1, 1: 3/4 · 1/4 + 1/4 · 3/4 = 3/8, though 2 of the
    # 4 pairs match.
    ours, theirs = (
        torch.eye(3)[torch.tensor([[0, 0, 0, 1, 2]])],
        torch.eye(3)[torch.tensor([[0, 1, 1, 1, 2]])],
    )
    found = torch.tensor([[True, True, True, True, False]])
    assert (
        independent_top1(ours, theirs, found) == pytest.approx(3 / 8)
        and match_ratios(ours, theirs, found).top1 == 0.5
    )
    collapsed = torch.eye(3)[torch.zeros(1, 5, dtype=torch.long)]
    assert independent_top1(collapsed, collapsed, found) == 1
    with pytest.raises(UserError, match="0 pairs"):
        independent_top1(ours, theirs, ~found & False)


def test_epochs_by_layer():
    # Three images, two layers, one token. Layer 0: two of three as the last, layer 1: none.
    epochs = [
        np.array([[[0], [1]], [[0], [1]], [[0], [1]]]),
        np.array([[[0], [2]], [[0], [2]], [[3], [2]]]),
    ]
    found = epoch_agreement_by_layer(epochs)
    assert found == {"with_final": [[2 / 3, 1.0], [0.0, 1.0]], "consecutive": [[2 / 3], [0.0]]}
    assert np.mean(found["with_final"], axis=0) == pytest.approx(
        epoch_agreement(epochs)["with_final"]
    )
    with pytest.raises(UserError, match=r"needed: \(images, layers, tokens\)"):
        epoch_agreement_by_layer([np.zeros((2, 3), dtype=int)])

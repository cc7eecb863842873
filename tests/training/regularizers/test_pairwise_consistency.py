import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.routing_records import TokenLayout
from moecore.training.regularizers.jensen_shannon import JensenShannon, jensen_shannon
from moecore.training.regularizers.pairwise_consistency import (
    PairwiseConsistency,
    pairwise_consistency,
)
from tests.training.small import record, step

ONE_HOT = torch.eye(8)
OURS = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4]
SPREAD = torch.tensor([OURS, [[0, 0.5, 0.25, 0.25], [0, 0, 1, 0], [0.5, 0, 0, 0.5]]])
ALL = torch.ones(2, 3, dtype=torch.bool)


def draw_two_views(*layers, special=1, columns=2, views=2, move=0.0):
    """A step of two views, layers (2B, T, E) with ``columns`` patches of 4 × 4 in a row; the second
    view is ``move`` pixels further right.
    """
    count = len(layers[0])
    affines = torch.eye(3).repeat(count, 1, 1)
    affines[count // 2 :, 1, 2] = move
    layout = TokenLayout(special, (1, columns), (4, 4 * columns))
    model = SimpleNamespace(layouts=(layout,) * len(layers))
    inputs = step(*(record(probs=layer) for layer in layers))
    batch = inputs.batch._replace(affines=affines, views=views)
    return inputs._replace(batch=batch, model=model)


def terms(first, second, found=None):
    """The means of (1 − S_ii)² and of S_ij² of one image's pairs (T', E)."""
    found = torch.ones(1, len(first), dtype=torch.bool) if found is None else found
    loss = partial(pairwise_consistency, first[None], second[None], found)
    parts = ((1.0, 0.0), (0.0, 1.0))
    return [loss(diagonal=diagonal, off_diagonal=other).item() for diagonal, other in parts]


def by_loops(first, second, found, diagonal, off_diagonal):
    """Equations 3 and 4 word by word."""
    experts, count, total = first.shape[-1], 0, 0.0
    matrix = [[0.0] * experts for _ in range(experts)]
    for image in range(first.shape[0]):
        for pair in range(first.shape[1]):
            if found[image, pair]:
                count += 1
                for i in range(experts):
                    for j in range(experts):
                        matrix[i][j] += first[image, pair, i].item() * second[image, pair, j].item()
    for i in range(experts):
        for j in range(experts):
            s = matrix[i][j] * experts / count
            if i == j:
                total += diagonal / experts * (1 - s) ** 2
            else:
                total += off_diagonal / (experts * (experts - 1)) * s**2
    return total


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (torch.full((8, 8), 1 / 8), (0.765625, 0.015625)),  # S_ij = 8/64 = 1/8: (7/8)² and (1/8)²
        (ONE_HOT, (0, 0)),  # S = I
        (ONE_HOT[[0, 1, 2, 3] * 2], (1, 0)),  # S_ii is 2 or 0 four times each: (1 − S_ii)² is 1
        (ONE_HOT[[0] * 8], (7, 0)),  # S_00 = 8: (49 + 7)/8
    ],
)
def test_the_four_routers_of_the_definitions(router, expected):
    assert terms(router, router) == pytest.approx(expected)


def test_unequal_choices_by_hand():
    # E = 2, pairs (e0, e1) and (e0, e0): S = 2/2·[[1, 1], [0, 0]]. Diagonal (0 + 1)/2; off the
    # diagonal (1 + 0)/2.
    hot = torch.eye(2)
    assert terms(hot[[0, 0]], hot[[1, 0]]) == pytest.approx((0.5, 0.5))
    # Without the second pair S = 2·[[0, 1], [0, 0]]: (1 + 1)/2 and 4/2.
    assert terms(hot[[0, 0]], hot[[1, 0]], torch.tensor([[True, False]])) == pytest.approx((1, 2))


def random_pairs(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 2, 5, 4, generator=generator, dtype=dtype).softmax(-1)
    return first, second, torch.rand(2, 5, generator=generator) < 0.7


@given(st.integers(0, 1000), st.floats(0, 2), st.floats(0, 2))
def test_agrees_with_loops(seed, diagonal, off_diagonal):
    first, second, found = random_pairs(seed)
    found[0, 0] = True
    weights = {"diagonal": diagonal, "off_diagonal": off_diagonal}
    ours = pairwise_consistency(first, second, found, **weights).item()
    assert ours == pytest.approx(by_loops(first, second, found, **weights))


def test_no_pair_is_no_loss_and_no_gradient():
    probs = SPREAD.clone().requires_grad_()
    loss = pairwise_consistency(probs, probs, ~ALL, diagonal=1.0, off_diagonal=1.0)
    loss.backward()
    assert loss.item() == 0 and torch.equal(probs.grad, torch.zeros_like(probs))


def test_autocast_does_not_round_the_correlation():
    loss = partial(pairwise_consistency, *random_pairs(0, torch.float32))
    expected = loss(diagonal=0.3, off_diagonal=0.7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(diagonal=0.3, off_diagonal=0.7), expected)


def test_partners_of_a_step_by_hand():
    # View 2 shows view 1's patch 0 as its patch 1, and nothing is the partner of view 1's patch 1.
    # E = 2: the one pair is (token 1 of view 1, token 2 of view 2) = (e0, e0): S = 2·[[1, 0], [0,
    # 0]], diagonal (1 + 1)/2 = 1, off the diagonal 0. With the class tokens (e0, e1): S = [[1, 1],
    # [0, 0]], diagonal (0 + 1)/2, off the diagonal (1 + 0)/2.
    moved = draw_two_views(torch.eye(2)[torch.tensor([[0, 0, 1], [1, 1, 0]])], move=4)
    for special, value in ((False, 0.1), (True, 0.05 + 0.005)):
        loss = PairwiseConsistency(diagonal=0.1, off_diagonal=0.01, special=special)
        assert loss(moved).item() == pytest.approx(value)


def test_views_of_different_resolution_may_change_places():
    loss, plain = PairwiseConsistency(), draw_two_views(SPREAD, columns=2)
    affines = plain.batch.affines.clone()
    # its centres 2 and 6 → 1 and 3, both patch 0 of the other
    affines[1, 0, 0] = affines[1, 1, 1] = 2
    given = plain._replace(batch=plain.batch._replace(affines=affines))
    turned = draw_two_views(SPREAD.flip(0), columns=2)
    turned = turned._replace(batch=turned.batch._replace(affines=affines.flip(0)))
    assert loss(given).item() == pytest.approx(loss(turned).item())
    assert loss(given).item() != pytest.approx(loss(plain).item())


def test_layers_are_summed():
    one, two = draw_two_views(SPREAD), draw_two_views(SPREAD, SPREAD)
    loss = PairwiseConsistency()
    assert loss(one).item() > 0 and loss(two).item() == pytest.approx(2 * loss(one).item())
    assert PairwiseConsistency.needs == {"routing", "two_views"}


# p = (1, 0), q = (½, ½), m = (¾, ¼): KL(p ‖ m) = ln(4/3); KL(q ‖ m) = ½ ln(2/3) + ½ ln 2 = ½
# ln(4/3). Half their sum:
VALUE = 0.75 * math.log(4 / 3)
FIRST = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
SECOND = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])  # the second pair: ln 2
BOTH = torch.tensor([[True, True]])


def test_value_by_hand():
    expected = (VALUE + math.log(2)) / 2
    assert jensen_shannon(FIRST, SECOND, BOTH).item() == pytest.approx(expected)
    one = torch.tensor([[True, False]])
    assert jensen_shannon(FIRST, SECOND, one).item() == pytest.approx(VALUE)
    assert jensen_shannon(FIRST, SECOND, ~BOTH).item() == 0


@given(st.integers(0, 1000), st.floats(0.1, 30))
def test_bounds_and_symmetries(seed, sharpness):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    first, second = (sharpness * logits).softmax(-1)
    found = torch.rand(3, 5, generator=generator) < 0.5
    found[0, 0] = True
    value = jensen_shannon(first, second, found)
    assert -1e-12 <= value.item() <= math.log(2) + 1e-12
    torch.testing.assert_close(jensen_shannon(second, first, found), value)
    names = torch.randperm(4)
    renamed = jensen_shannon(first[..., names], second[..., names], found)
    torch.testing.assert_close(renamed, value)
    assert jensen_shannon(first, first, found).item() == 0


def test_probabilities_of_zero_stay_finite():
    first, second = FIRST.clone().requires_grad_(), FIRST.flip(-1).clone().requires_grad_()
    for other in (second, first):  # no expert in common; equal, with a shared zero
        loss = jensen_shannon(first, other, BOTH)
        loss.backward()
        assert loss.isfinite() and first.grad.isfinite().all()
    assert second.grad.isfinite().all()


def test_layers_are_summed_and_pairs_come_from_the_affines():
    # View 2 shows view 1's patch 0 as its patch 1: tokens 1 and 2 are the only pair, p = (1, 0)
    # with q = (½, ½).
    layer = torch.tensor([[[1.0, 0], [1, 0], [0, 1]], [[0, 1], [0, 1], [0.5, 0.5]]])
    moved = draw_two_views(layer, layer, move=4)
    assert JensenShannon(weight=7.0)(moved).item() == pytest.approx(2 * VALUE)
    with_class = JensenShannon(special=True)(moved).item()  # each layer: (VALUE + ln 2)/2
    assert with_class == pytest.approx(VALUE + math.log(2))
    assert JensenShannon.needs == {"routing", "two_views"}


def test_layers_with_other_grids_have_pairs_of_their_own():
    """A second stage of one patch twice as large: its loss is that of its own tokens alone."""
    fine = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    coarse = torch.rand(2, 1, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
    loss = PairwiseConsistency(special=False)

    def of_layers(*given):
        layers, layouts = zip(*given, strict=True)
        inputs = draw_two_views(*layers, special=0)
        return loss(inputs._replace(model=SimpleNamespace(layouts=layouts))).item()

    both = (fine, TokenLayout(0, (2, 2), (8, 8))), (coarse, TokenLayout(0, (1, 1), (8, 8)))
    assert of_layers(*both) == pytest.approx(of_layers(both[0]) + of_layers(both[1]))

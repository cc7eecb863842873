"""Group sparsity by hand, by loops and as its authors wrote it; orthogonality, ‖BᵀB − I‖²."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moecore.core.routing_records import TokenLayout
from moecore.nn.experts.base import expert_grid_shape
from moecore.nn.experts.eigen import Eigen
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.training.regularizers import pairwise_consistency as module
from moecore.training.regularizers.group_sparsity import (
    GroupSparsity,
    filter_weights,
    group_sparsity,
)
from moecore.training.regularizers.jensen_shannon import JensenShannon, jensen_shannon
from moecore.training.regularizers.orthogonality import Orthogonality, orthogonality_penalty
from tests.training.small import record, step

AVERAGE = math.inf
# exp(−d²/2σ²) = 2^(−d²): one side is (½, 1, ½)/2 = (¼, ½, ¼)
BINARY = math.sqrt(1 / (2 * math.log(2)))


def value(probs, sigma=AVERAGE, size=3):
    return group_sparsity(probs=torch.as_tensor(probs)[None, None], size=size, sigma=sigma).item()


def near(expected):
    """ε under the root adds up to 1e-6 for each window in which all is 0."""
    return pytest.approx(expected, abs=1e-5)


def one_hot(expert, experts=16):
    return torch.eye(experts)[expert]


def by_loops(probs, size, sigma):
    """Algorithm 1 window by window: the square root of the weighted sum of squares within it."""
    total, (rows, columns) = 0.0, expert_grid_shape(probs.shape[-1])
    tall, wide = min(size, rows), min(size, columns)
    weight = {
        (i, j): math.exp(-((i - (tall - 1) / 2) ** 2 + (j - (wide - 1) / 2) ** 2) / (2 * sigma**2))
        for i in range(tall)
        for j in range(wide)
    }
    tokens = probs.flatten(0, -2).tolist()
    for token in tokens:
        for top in range(rows - tall + 1):
            for left in range(columns - wide + 1):
                energy = sum(
                    w / sum(weight.values()) * token[(top + i) * columns + left + j] ** 2
                    for (i, j), w in weight.items()
                )
                total += math.sqrt(energy)
    return total / len(tokens)


def test_average_and_gaussian_filter_by_hand():
    # 4 × 4 map, 3 × 3 windows of weight 1/9: four windows. A corner lies in one of them, an edge in
    # two, the middle in all four.
    assert value(one_hot(0)) == near(1 / 3) and value(one_hot(15)) == near(1 / 3)
    assert value(one_hot(1)) == near(2 / 3) and value(one_hot(5)) == near(4 / 3)
    # Uniform: the mean of 1/16² in each of four windows, 4·(1/16).
    assert value(torch.full((16,), 1 / 16)) == near(1 / 4)
    # Weights: 1/16 in the corners, 1/8 on the edges, 1/4 in the middle. Expert 5, at (1, 1), is the
    # middle of the first window, on an edge of two and in the corner of the last: ½ + 2/√8 + ¼.
    assert value(one_hot(0), BINARY) == near(1 / 4)
    assert value(one_hot(5), BINARY) == near(0.75 + 2 / math.sqrt(8))
    assert value(torch.full((16,), 1 / 16), BINARY) == near(1 / 4)  # the weights sum to 1


def test_a_map_with_two_rows_cuts_the_filter():
    # 8 experts: a 2 × 4 map, 2 × 3 windows, two of them, side by side.
    assert [value(one_hot(expert, 8)) for expert in (0, 4, 3)] == [near(math.sqrt(1 / 6))] * 3
    assert value(one_hot(1, 8)) == value(one_hot(6, 8)) == near(2 * math.sqrt(1 / 6))
    # Gaussian: both rows weigh ½, columns ¼, ½, ¼. Expert 2 ends the first window and is in the
    # middle of the second.
    assert value(one_hot(0, 8), BINARY) == near(math.sqrt(1 / 8))
    assert value(one_hot(2, 8), BINARY) == near(math.sqrt(1 / 8) + 1 / 2)


@given(
    st.sampled_from([4, 6, 7, 8, 16, 30]),
    st.integers(1, 4),
    st.sampled_from([0.5, 1.5, 10.0, AVERAGE]),
    st.integers(0, 1000),
)
def test_agrees_with_loops(experts, size, sigma, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(2, 3, experts, generator=generator, dtype=torch.float64)
    probs = (3 * probs).softmax(-1)
    found = group_sparsity(probs=probs, size=size, sigma=sigma).item()
    assert found == pytest.approx(by_loops(probs, size, sigma), rel=1e-3)


def test_probabilities_of_zero_stay_finite_and_autocast_rounds_nothing():
    probs = torch.stack([one_hot(0), torch.zeros(16)])[None].requires_grad_()
    group_sparsity(probs=probs, size=3, sigma=1.5).backward()
    assert probs.grad.isfinite().all() and probs.grad[0, 0, 0] > 0
    probs = torch.randn(2, 3, 16).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = group_sparsity(probs=probs, size=3, sigma=1.5)
    assert torch.equal(low, group_sparsity(probs=probs, size=3, sigma=1.5))


@pytest.mark.parametrize(
    ("settings", "progress", "sigma"),
    [
        ({}, 0.0, 10.0),
        ({}, 1.0, 1.5),
        ({"exponent": 0.5}, 0.25, 5.75),  # 10 − 8.5·½
        ({"exponent": 0.0}, 0.0, 1.5),  # 0⁰ = 1: constant
    ],
)
def test_schedule_by_hand(settings, progress, sigma):
    assert GroupSparsity(**settings).sigma(progress) == pytest.approx(sigma)


def test_a_step_uses_the_sigma_of_its_progress_and_layers_are_summed():
    probs = torch.randn(2, 3, 16).softmax(-1)
    for progress in (0.0, 0.25):
        expected = group_sparsity(probs=probs, size=2, sigma=10 - 8.5 * progress**0.3)
        layers = step(record(probs=probs), record(probs=probs), progress=progress)
        torch.testing.assert_close(GroupSparsity(size=2, weight=7.0)(layers), 2 * expected)
    average = GroupSparsity(filter="average")(step(record(probs=probs), progress=0.9))
    torch.testing.assert_close(average, group_sparsity(probs=probs, size=3, sigma=AVERAGE))


# Tokens of a batch, experts, λ as MoGE prints it, and the weight that `mean` needs for the same
# term: λ · N / (h² · positions). The positions of maps of 4 × 8, 8 × 16 and 20 × 20 are counted by
# hand: 2 · 6, 6 · 14 and 18 · 18.
FACTORS = [
    (8320, 32, 4e-3, 4e-3 * 8320 / (9 * 12)),
    (8320, 128, 4e-3, 4e-3 * 8320 / (9 * 84)),
    (200, 400, 4e-3, 4e-3 * 200 / (9 * 324)),
]


@pytest.mark.parametrize(("tokens", "experts", "printed", "weight"), FACTORS)
def test_the_authors_term_is_the_mean_with_another_weight(tokens, experts, printed, weight):
    # They differ in ε under the root alone (1e-8 and 1e-12): uniform probs would show that, peaked
    # ones in float64 hardly do.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, tokens, experts, generator=generator, dtype=torch.float64)
    probs = (logits / 4).softmax(-1)
    ours = weight * group_sparsity(probs=probs, size=3, sigma=1.5)
    assert ours.item() == pytest.approx(printed * by_the_authors(probs, 1.5, 1e-12), rel=1e-6)
    shown = printed * group_sparsity(probs=probs, size=3, sigma=1.5, reduction="authors")
    assert shown.item() == pytest.approx(printed * by_the_authors(probs, 1.5, 1e-8), rel=1e-6)


def by_the_authors(probs, sigma, epsilon):
    """Sum over tokens, mean over positions, divided by h² = 9, through conv2d."""
    rows, columns = expert_grid_shape(probs.shape[-1])
    side = torch.tensor(filter_weights(3, sigma), dtype=torch.float64)
    kernel = torch.outer(side, side)[None, None]
    pooled = torch.nn.functional.conv2d(probs.reshape(-1, 1, rows, columns) ** 2, kernel)
    return ((pooled + epsilon).sqrt().mean(dim=(1, 2, 3)).sum() / 9).item()


def test_on_a_circular_map_all_experts_are_alike():
    def circular(probs):
        return group_sparsity(probs=probs[None, None], size=3, sigma=1.5, padding="circular").item()

    found = [circular(one_hot(expert)) for expert in range(16)]
    # One expert lies in nine windows; the sum of the roots of their weights.
    side = [math.sqrt(weight) for weight in filter_weights(3, 1.5)]
    assert found == pytest.approx([sum(side) ** 2] * 16, abs=1e-4)
    probs = torch.randn(16, generator=torch.Generator().manual_seed(0)).softmax(-1)
    rolled = probs.view(4, 4).roll((1, 2), (0, 1)).flatten()
    assert circular(rolled) == pytest.approx(circular(probs), rel=1e-5)
    assert value(rolled, 1.5) != pytest.approx(value(probs, 1.5), rel=1e-3)


def of_model(model):
    return Orthogonality(weight=7.0)(step()._replace(model=model))


def test_orthogonality_by_hand_its_gradient_and_under_autocast():
    # Expert 0: columns (1, 1, 0) and (0, 2, 0): BᵀB = [[2, 2], [2, 4]], minus I = [[1, 2], [2, 3]]:
    # 1 + 4 + 4 + 9 = 18. Expert 1: columns (0, 0, 0) and (0, 0, 1): BᵀB − I = [[−1, 0], [0, 0]]: 1.
    # Together 19, not their mean and not a norm.
    basis = torch.tensor([[[1.0, 0], [1, 2], [0, 0]], [[0, 0], [0, 0], [0, 1]]])
    assert orthogonality_penalty(basis=basis).item() == 19
    assert orthogonality_penalty(basis=basis[1:]).item() == 1
    basis = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    # d/dB ‖BᵀB − I‖² = 4 B (BᵀB − I)
    (gradient,) = torch.autograd.grad(orthogonality_penalty(basis=basis), basis)
    torch.testing.assert_close(gradient, 4 * basis @ (basis.mT @ basis - torch.eye(3)))
    basis = torch.linalg.qr(torch.randn(2, 64, 40)).Q
    with torch.autocast("cpu", torch.bfloat16):
        value = orthogonality_penalty(basis=basis)
    assert value.dtype == torch.float32 and value < 1e-8  # rounded to bf16 it would be some 1e-2


def test_layers_are_summed_whoever_owns_the_basis():
    experts = Eigen(number=3, rank=2).build(4)
    router = Eigenbasis().build(4, 3, experts.basis)
    shared = MoEFeedForward(router, experts, Eigenbasis().wants, Eigen.provides)
    own = Eigenbasis(rank=2).build(4, 3)
    model = nn.ModuleDict({"shared": shared, "own": own, "dense": nn.Linear(4, 4)})
    model["dense"].no_basis = nn.Parameter(torch.randn(3, 4, 2))  # not called `basis`
    with torch.no_grad():
        experts.basis.mul_(2)  # BᵀB − I = 3 I: 9·r = 18 an expert, 54
        own.basis.mul_(0)  # −I: r = 2 an expert, 6
    assert of_model(model).item() == pytest.approx(60, rel=1e-5)
    assert of_model(own).item() == pytest.approx(6)  # a parameter of the model itself


ONE_HOT = torch.eye(8)
OURS = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4]
SPREAD = torch.tensor([OURS, [[0, 0.5, 0.25, 0.25], [0, 0, 1, 0], [0.5, 0, 0, 0.5]]])
ALL = torch.ones(2, 3, dtype=torch.bool)


def draw_two_views(*layers, special=1, columns=2, views=2, move=0.0):
    """Layers (2B, T, E), ``columns`` patches of 4 × 4; view 2 is ``move`` pixels right."""
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
    loss = partial(module.pairwise_consistency, first[None], second[None], found)
    parts = ((1.0, 0.0), (0.0, 1.0))
    return [loss(diagonal=diagonal, off_diagonal=other).item() for diagonal, other in parts]


def pairs_by_loops(first, second, found, diagonal, off_diagonal):
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
def test_pairs_agree_with_loops(seed, diagonal, off_diagonal):
    first, second, found = random_pairs(seed)
    found[0, 0] = True
    weights = {"diagonal": diagonal, "off_diagonal": off_diagonal}
    ours = module.pairwise_consistency(first, second, found, **weights).item()
    assert ours == pytest.approx(pairs_by_loops(first, second, found, **weights))


def test_no_pair_is_no_loss_and_autocast_rounds_no_correlation():
    probs = SPREAD.clone().requires_grad_()
    loss = module.pairwise_consistency(probs, probs, ~ALL, diagonal=1.0, off_diagonal=1.0)
    loss.backward()
    assert loss.item() == 0 and torch.equal(probs.grad, torch.zeros_like(probs))
    loss = partial(module.pairwise_consistency, *random_pairs(0, torch.float32))
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
        loss = module.PairwiseConsistency(diagonal=0.1, off_diagonal=0.01, special=special)
        assert loss(moved).item() == pytest.approx(value)


def test_views_of_different_resolution_may_change_places():
    loss, plain = module.PairwiseConsistency(), draw_two_views(SPREAD, columns=2)
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
    loss = module.PairwiseConsistency()
    assert loss(one).item() > 0 and loss(two).item() == pytest.approx(2 * loss(one).item())
    assert module.PairwiseConsistency.needs == {"routing", "two_views"}


# p = (1, 0), q = (½, ½), m = (¾, ¼): KL(p ‖ m) = ln(4/3); KL(q ‖ m) = ½ ln(2/3) + ½ ln 2 = ½
# ln(4/3). Half their sum:
VALUE = 0.75 * math.log(4 / 3)
FIRST = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
SECOND = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])  # the second pair: ln 2
BOTH = torch.tensor([[True, True]])


def test_pairs_by_hand():
    assert jensen_shannon(FIRST, SECOND, BOTH).item() == pytest.approx((VALUE + math.log(2)) / 2)
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
    torch.testing.assert_close(jensen_shannon(first[..., names], second[..., names], found), value)
    assert jensen_shannon(first, first, found).item() == 0


def test_pairs_of_zero_probability_stay_finite():
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
    loss = module.PairwiseConsistency(special=False)

    def of_layers(*given):
        layers, layouts = zip(*given, strict=True)
        inputs = draw_two_views(*layers, special=0)
        return loss(inputs._replace(model=SimpleNamespace(layouts=layouts))).item()

    both = (fine, TokenLayout(0, (2, 2), (8, 8))), (coarse, TokenLayout(0, (1, 1), (8, 8)))
    assert of_layers(*both) == pytest.approx(of_layers(both[0]) + of_layers(both[1]))

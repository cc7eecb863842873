"""Theorems 1 and 2 on data whose answers are known by hand, and on whatever hypothesis draws. Both
theorems on a small sweep.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lipschitz_theory.linear_experts import LinearExperts, theorem_2_over_seeds
from lipschitz_theory.theorems import (
    RegressionSamples,
    angled_subspaces,
    draw_expert_data,
    expert_subspace_bases,
    least_squares,
    stack_expert_data,
    theorem_1_sides,
    theorem_2,
)

from moecore.measure.values import Found
from moecore.testing import check_calculation

SIZES = {"dimension": 24, "rank": 3, "samples": 9}


def part(points, targets) -> RegressionSamples:
    return RegressionSamples(np.array(points, dtype=float), np.array(targets, dtype=float))


def random_parts(seed: int) -> list[RegressionSamples]:
    """2 to 4 experts with 1 to 6 points in 1 to 6 dimensions; some points repeat or vanish."""
    generator = np.random.default_rng(seed)
    dimension = generator.integers(1, 7)
    sizes = generator.integers(1, 7, generator.integers(2, 5))
    points = [
        generator.standard_normal((size, dimension)) * 10.0 ** generator.uniform(-1, 1)
        for size in sizes
    ]
    if seed % 3 == 0:
        points[0][0], points[1][:1] = 0, points[0][-1:]
    return [RegressionSamples(x, generator.standard_normal(len(x))) for x in points]


# --- least squares


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_least_squares_is_the_pseudo_inverse(seed):
    for own in random_parts(seed):
        found, gram = least_squares(own), own.points.T @ own.points
        np.testing.assert_allclose(
            found.weights, np.linalg.pinv(own.points) @ own.targets, rtol=1e-7, atol=1e-9
        )
        np.testing.assert_allclose(
            found.inverse @ gram @ found.inverse,
            found.inverse,
            rtol=1e-6,
            atol=1e-7 * np.abs(found.inverse).max(),
        )
        np.testing.assert_allclose(
            found.span @ found.span.T @ own.points.T, own.points.T, atol=1e-9
        )


def test_the_shortest_of_many_minimisers():
    # one point (1, 1) with target 2: every w on w1 + w2 = 2 fits; the shortest is (1, 1)
    found = least_squares(part([[1, 1]], [2]))
    np.testing.assert_allclose(found.weights, [1, 1])
    # (2 vvᵀ)⁺ = vvᵀ / 2 with v = (1, 1)/√2
    np.testing.assert_allclose(found.inverse, [[0.25, 0.25], [0.25, 0.25]])


def test_no_points_but_zeros():
    found = least_squares(part([[0, 0]], [5]))
    assert not found.weights.any() and not found.inverse.any() and found.span.shape == (2, 0)


# --- Theorem 1, the paper's two examples


def test_orthogonal_points_reach_the_bound():
    # w1 = (1, 0), w2 = (0, 3), w* = (1, 3): 10 = 1 + 9, and nothing is subtracted
    found = theorem_1_sides([part([[2, 0]], [2]), part([[0, 1]], [3])])
    assert found.dense == pytest.approx(math.sqrt(10)) and list(found.experts) == pytest.approx(
        [1, 3]
    )
    assert found.epsilon_1 == pytest.approx(0, abs=1e-15) and found.epsilon_2 == pytest.approx(
        0, abs=1e-15
    )
    assert (
        found.right == pytest.approx(10)
        and found.ratio == pytest.approx(3 / math.sqrt(10))
        and found.holds
    )


def test_orthogonal_points_of_equal_length_too():
    # XᵀX = 2·1, of which every basis is a basis of singular vectors; the one along the data has
    # ε1 = 0
    parts = [part([[1, 1]], [2]), part([[1, -1]], [0.5])]
    found = theorem_1_sides(parts)
    assert found.epsilon_1 == pytest.approx(0, abs=1e-14) and found.epsilon_2 == pytest.approx(
        0, abs=1e-14
    )
    assert found.right == pytest.approx(found.dense**2)
    first, second = expert_subspace_bases(parts)
    assert first.shape == second.shape == (2, 1) and abs(first[:, 0] @ [1, -1]) < 1e-14


def test_opposite_points_leave_the_dense_model_nothing():
    # X1 = −X2, y1 = y2: Xᵀy = 0, so w* = 0, while both experts fit their points
    points, targets = [[1, 2], [0, 1]], [1, 1]
    found = theorem_1_sides([part(points, targets), part(-np.array(points), targets)])
    assert found.dense == pytest.approx(0, abs=1e-14)
    # w1 solves w1 + 2 w2 = 1, w2 = 1: (−1, 1), and the other expert its negative
    assert list(found.experts) == pytest.approx([math.sqrt(2)] * 2)
    assert found.right == 0 and found.holds and found.ratio > 1e10


def test_opposite_points_in_one_dimension_by_hand():
    # Z⁺ = 1/2, Z_i⁺ = 1; the only singular vector is the first expert's: ε1 = max(|1/2 − 1|,
    # |0 − 1|) = 1, ε2 = 1
    found = theorem_1_sides([part([[1]], [1]), part([[-1]], [1])])
    assert (found.dense, found.epsilon_1, found.epsilon_2) == (
        pytest.approx(0, abs=1e-15),
        pytest.approx(1),
        pytest.approx(1),
    )
    # 1 − 1·0 − 1·1 = 0
    assert found.right == pytest.approx(0, abs=1e-30) and found.ratio > 1e10 and found.holds


@pytest.mark.parametrize("experts", [2, 3, 5])
def test_the_theorem_as_printed_is_false(experts):
    # E points 1 with target 1: w* = w_i* = 1, ε1 = ε2 = 1, ‖Xᵀy‖ = E, so each bracket is 1 − E −
    # (E − 1) = 2 − 2E
    found = theorem_1_sides([part([[1]], [1])] * experts)
    assert found.dense == pytest.approx(1) and found.right == 0 and found.holds
    assert (
        found.literal == pytest.approx(experts * (2 - 2 * experts) ** 2) and not found.literal_holds
    )


def test_two_points_at_sixty_degrees_by_hand():
    # x1 = (1, 0), x2 = (1/2, √3/2). Both singular vectors overlap both points alike, so the first
    # expert has them, the second none: ε1 = max(‖Z⁻¹ − x1x1ᵀ‖, ‖x2x2ᵀ‖) with Z⁻¹ = [[1, −1/√3],
    # [−1/√3, 5/3]]; λ² − 5/3 λ − 1/3 = 0 gives (5 + √37)/6.  ε2 = cos 60°
    found = theorem_1_sides([part([[1, 0]], [1]), part([[0.5, math.sqrt(3) / 2]], [1])])
    assert found.epsilon_1 == pytest.approx(
        (5 + math.sqrt(37)) / 6
    ) and found.epsilon_2 == pytest.approx(0.5)
    # w = (1, 1/√3) fits both
    assert (
        found.dense == pytest.approx(2 / math.sqrt(3))
        and list(found.experts) == pytest.approx([1, 1])
        and found.right == 0
    )


def test_brackets_by_hand_with_given_bases():
    # x1 = (1, 0), x2 = (h, 1): Z⁻¹ = [[1, −h], [−h, 1 + h²]] (determinant 1). With U_i = e_i: the
    # first difference is [[0, −h], [0, 0]].
    # Spans: ‖Z_1⁺ x2/|x2|‖ = h / √(1 + h²), and the other way round 1 + h² times less.  One bracket
    # is above 0, one below
    h = 0.1
    x2, one, square = np.array([h, 1]), np.eye(2), 1 + h * h
    found = theorem_1_sides(
        [part([[1, 0]], [1]), RegressionSamples(x2[None], np.array([0.1]))],
        [one[:, :1], one[:, 1:]],
    )
    second = np.array([[0, 0], [-h, square]]) - np.outer(x2, x2) / square**2
    epsilon_1, epsilon_2 = max(h, float(np.linalg.svd(second)[1][0])), h / math.sqrt(square)
    assert found.epsilon_1 == pytest.approx(epsilon_1) and found.epsilon_2 == pytest.approx(
        epsilon_2
    )
    pull = math.hypot(1 + 0.1 * h, 0.1)  # Xᵀy = x1 + x2 / 10
    brackets = (
        1 - epsilon_1 * pull - epsilon_2 * 0.1 * math.sqrt(square),
        0.1 / math.sqrt(square) - epsilon_1 * pull - epsilon_2 * 1,
    )
    assert brackets[0] > 0 > brackets[1]
    assert found.literal == pytest.approx(
        brackets[0] ** 2 + brackets[1] ** 2
    ) and found.right == pytest.approx(brackets[0] ** 2)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_the_bound_holds_for_any_data(seed):
    parts = random_parts(seed)
    found = theorem_1_sides(parts)
    assert found.holds and found.right <= found.literal * (1 + 1e-12)
    whole = least_squares(stack_expert_data(parts)).span
    rotated = (
        whole @ np.linalg.qr(np.random.default_rng(seed).standard_normal((whole.shape[1],) * 2))[0]
    )
    cuts = np.sort(np.random.default_rng(seed + 1).integers(0, whole.shape[1] + 1, len(parts) - 1))
    assert theorem_1_sides(parts, np.split(rotated, cuts, axis=1)).holds, (
        "any orthogonal bases of the span will do"
    )


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_projections_are_a_basis_of_the_span(seed):
    parts = random_parts(seed)
    vectors, whole = (
        np.concatenate(expert_subspace_bases(parts), axis=1),
        least_squares(stack_expert_data(parts)).span,
    )
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(vectors.shape[1]), atol=1e-10)
    np.testing.assert_allclose(vectors @ vectors.T, whole @ whole.T, atol=1e-8)


def test_projections_go_to_the_nearest_expert():
    # singular vectors e1 (length 3) and e2 (length 2); the second expert's point is e1
    first, second = expert_subspace_bases([part([[0, 2]], [0]), part([[3, 0]], [0])])
    np.testing.assert_allclose(np.abs(first), [[0], [1]], atol=1e-14)
    np.testing.assert_allclose(np.abs(second), [[1], [0]], atol=1e-14)


# --- the sweep's data


@settings(deadline=None)
@given(st.integers(2, 8), st.sampled_from([0.0, 7.0, 33.0, 60.0, 90.0]), st.integers(0, 100))
def test_any_two_subspaces_meet_at_the_angle(experts, angle, seed):
    bases = angled_subspaces(experts, 2, 17, angle, np.random.default_rng(seed))
    for i in range(experts):
        for j in range(experts):
            expected = np.eye(2) * (1 if i == j else math.cos(math.radians(angle)))
            np.testing.assert_allclose(bases[i].T @ bases[j], expected, atol=1e-12)


@pytest.mark.parametrize("targets", ["shared", "opposed", "drawn"])
def test_drawn_parts_are_balanced_and_repeatable(targets):
    parts, betas = draw_expert_data(4, 40.0, targets, 3, **SIZES)
    again, _ = draw_expert_data(4, 40.0, targets, 3, **SIZES)
    assert all(
        np.array_equal(a, b)
        for one, other in zip(parts, again, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    np.testing.assert_allclose(np.linalg.norm(betas, axis=1), 1)
    for own, beta in zip(parts, betas, strict=True):
        assert own.points.shape == (9, 24) and np.linalg.matrix_rank(own.points) == 3
        np.testing.assert_allclose(least_squares(own).weights, beta, atol=1e-12)
    signs = np.sign(betas @ betas[0])
    assert targets == "drawn" or list(signs) == (
        [1, -1, 1, -1] if targets == "opposed" else [1] * 4
    )


def test_floor_and_noise():
    parts, betas = draw_expert_data(2, 40.0, "shared", 3, floor=0.5, noise=0.1, **SIZES)
    assert all(np.linalg.matrix_rank(own.points) == 24 for own in parts)
    np.testing.assert_array_equal(parts[0].points[9:], 0.5 * np.eye(24))
    residuals = np.concatenate(
        [own.targets - own.points @ beta for own, beta in zip(parts, betas, strict=True)]
    )
    assert 0.07 < residuals.std() < 0.13


@pytest.mark.parametrize("experts", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("targets", ["shared", "opposed", "drawn"])
def test_orthogonal_subspaces_give_one_over_root_e(experts, targets):
    parts, _ = draw_expert_data(experts, 90.0, targets, experts, dimension=96, rank=3, samples=9)
    found = theorem_1_sides(parts)
    assert found.ratio == pytest.approx(1 / math.sqrt(experts), rel=1e-9)
    assert (
        found.right == pytest.approx(found.dense**2, rel=1e-6)
        and found.epsilon_1 < 1e-10
        and found.epsilon_2 < 1e-10
    )


# shared: V_iᵀw = b for all i has the shortest solution Σ V_k b / (1 + (E−1)c), of length² E /
# (1 + (E−1)c).
# opposed, E even: V_iᵀw = ±b has Σ ±V_k b / (1 − c), of length² E / (1 − c). Experts have length 1.
@pytest.mark.parametrize("angle", [5.0, 30.0, 60.0, 89.0])
@pytest.mark.parametrize("experts", [2, 4, 8])
def test_the_ratio_in_closed_form(experts, angle):
    cosine = math.cos(math.radians(angle))
    for targets, expected in (
        ("shared", (1 + (experts - 1) * cosine) / experts),
        ("opposed", (1 - cosine) / experts),
    ):
        found = theorem_1_sides(draw_expert_data(experts, angle, targets, 1, **SIZES)[0])
        assert found.ratio**2 == pytest.approx(expected, rel=1e-8) and found.holds


# --- Theorem 2


def wedge(
    degrees: float, sign: int, floor: float = 1e-4
) -> tuple[list[RegressionSamples], np.ndarray]:
    """Two directions u1, u2 at ``degrees`` from the first axis, one above and one below it;
    β = (u1, ±u2).
    """
    a = math.radians(degrees)
    lines = np.array([[math.cos(a), math.sin(a)], [math.cos(a), -math.sin(a)]])
    betas = lines * [[1], [sign]]
    points = [np.concatenate([line[None], floor * np.eye(2)]) for line in lines]
    return [RegressionSamples(x, x @ beta) for x, beta in zip(points, betas, strict=True)], betas


# u1·w = 1 and u2·w = −1: w* = (0, 1/sin a). Δ_1 = β_1 − w*, ‖Δ_1‖² = 1 − 2 + 1/sin² a = cot² a.
# Condition: cot a ≥ 1 + 1/√γ
CASES = [
    (10, True, True),
    (20, True, False),
    (26, True, False),
    (27, False, False),
    (40, False, False),
]


@pytest.mark.parametrize(("degrees", "promised", "simple"), CASES)
def test_theorem_2_by_hand(degrees, promised, simple):
    found, a = theorem_2(*wedge(degrees, -1)), math.radians(degrees)
    assert found.ratio_squared == pytest.approx(math.sin(a) ** 2, rel=1e-5)
    assert found.gamma == (
        pytest.approx((1 / (1 / math.tan(a) - 1)) ** 2, rel=1e-5) if promised else None
    )
    assert found.simple == (pytest.approx((4 * math.tan(a)) ** 2, rel=1e-5) if simple else None)
    assert found.holds


def test_theorem_2_promises_nothing_where_experts_agree():
    # w* = (1/cos a, 0), ‖Δ‖ = tan a < 2
    found = theorem_2(*wedge(10, 1))
    assert (
        found.gamma is None
        and found.simple is None
        and found.ratio_squared == pytest.approx(math.cos(math.radians(10)) ** 2, rel=1e-5)
    )


def by_definition(parts, betas, gamma: float) -> bool:
    """The condition of Theorem 2 as the paper writes it, with inverses and double sums."""
    grams = [own.points.T @ own.points for own in parts]
    inverse, residuals = (
        np.linalg.inv(sum(grams)),
        [own.targets - own.points @ beta for own, beta in zip(parts, betas, strict=True)],
    )
    eta = inverse @ sum(own.points.T @ r for own, r in zip(parts, residuals, strict=True))
    for i, beta in enumerate(betas):
        shift = sum(
            (inverse @ grams[j] @ (beta - other) for j, other in enumerate(betas) if j != i),
            np.zeros_like(beta),
        )
        own = np.linalg.inv(grams[i]) @ parts[i].points.T @ residuals[i]
        if np.linalg.norm(shift) < np.linalg.norm(beta + eta) + np.linalg.norm(
            beta + own
        ) / math.sqrt(gamma):
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.floats(5, 90),
    st.sampled_from(["shared", "opposed", "drawn"]),
)
def test_theorem_2_is_the_papers_and_true(seed, experts, angle, targets):
    parts, betas = draw_expert_data(
        experts, angle, targets, seed, dimension=12, rank=2, samples=6, floor=0.2, noise=0.02
    )
    found = theorem_2(parts, betas)
    dense, own = (
        least_squares(stack_expert_data(parts)).weights,
        [least_squares(one).weights for one in parts],
    )
    assert found.ratio_squared == pytest.approx(
        max(np.dot(w, w) for w in own) / np.dot(dense, dense), rel=1e-6
    )
    assert found.holds and (found.simple is None or found.simple >= found.gamma * (1 - 1e-9))
    if found.gamma is None:
        assert not by_definition(parts, betas, 1.0)
    else:
        assert by_definition(parts, betas, min(1.0, found.gamma * 1.001)) or found.gamma > 0.999
        assert not by_definition(parts, betas, found.gamma * 0.999)


def test_the_corollary_asks_for_small_residuals():
    parts, betas = wedge(10, -1, floor=0.01)
    # the residual lies along the floor's rows only: η_i = r / 0.01 there, so 0.02 gives length
    # 2 > ‖β‖ = 1
    noisy = [
        RegressionSamples(
            parts[0].points,
            parts[0].targets
            + [0, -0.02 * math.sin(math.radians(10)), 0.02 * math.cos(math.radians(10))],
        ),
        parts[1],
    ]
    assert theorem_2(parts, betas).simple is not None and theorem_2(noisy, betas).simple is None


@pytest.fixture(scope="module")
def found() -> Found:
    return check_calculation(LinearExperts(experts=(2, 4, 8), angles=(5, 60, 90)))


def test_every_combination_is_there_and_no_bound_fails(found):
    totals = found.numbers()
    assert len(found.all("ratio")) == 3 * 3 * 3 and totals["draws"] == 81
    assert totals["violations"] == 0 and totals["theorem_2_violations"] == 0


# With c = cos 60° = 1/2: shared
# √((1 + (E−1)c)/E), opposed √((1 − c)/E).
def test_rows_at_sixty_degrees(found):
    for experts in (2, 4, 8):
        shared, opposed = (
            found.find("ratio", targets=targets, experts=experts, angle=60)
            for targets in ("shared", "opposed")
        )
        assert shared.value == pytest.approx(math.sqrt((1 + (experts - 1) / 2) / experts), rel=1e-8)
        assert opposed.value == pytest.approx(math.sqrt(1 / 2 / experts), rel=1e-8)
        assert shared.low == pytest.approx(shared.high, rel=1e-6), "it does not depend on the draw"


def test_the_printed_theorem_fails_where_the_proofs_does_not(found):
    # At 90° the cross terms vanish and both forms agree: only the draws at 5° and 60° violate it.
    assert found.numbers()["literal_violations"] == 81 * 2 / 3


def test_theorem_2_promises_where_experts_disagree(found):
    assert all(one.gamma is not None for one in theorem_2_over_seeds(8, 60, "opposed"))
    assert all(one.gamma is None for one in theorem_2_over_seeds(2, 5, "shared"))
    assert 2 <= found.numbers()["theorem_2_promises"] <= 81 - 2

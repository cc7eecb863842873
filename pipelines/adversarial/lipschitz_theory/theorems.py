"""Data for linear experts: points in subspaces at a given angle, one subspace per expert.

E experts, D dimensions, N_i points of expert i, r rank of a subspace.
"""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np

Targets = Literal["shared", "opposed", "drawn"]


class RegressionSamples(NamedTuple):
    """Data of one expert: points (N_i, D) and targets (N_i,)."""

    points: np.ndarray
    targets: np.ndarray


def angled_subspaces(
    experts: int, rank: int, dimension: int, angle: float, generator: np.random.Generator
) -> np.ndarray:
    """Return orthonormal bases (E, D, r) with all principal angles ``angle``, in degrees.

    0°: equal, 90°: orthogonal. The coefficients are the symmetric root of the matrix with
    cos(angle) off its diagonal.
    """
    if experts * rank > dimension or not 0 <= angle <= 90:
        raise ValueError(
            f"subspaces: {experts} of rank {rank} at {angle}° in {dimension} dimensions; "
            "E·r ≤ D and 0 ≤ angle ≤ 90 are needed"
        )
    if angle < 90:
        cosine = math.cos(math.radians(angle))
    else:
        cosine = 0.0
    mean = np.full((experts, experts), 1 / experts)
    root = (
        math.sqrt(1 - cosine) * (np.eye(experts) - mean)
        + math.sqrt(1 + (experts - 1) * cosine) * mean
    )
    blocks = np.linalg.qr(generator.standard_normal((dimension, experts * rank)))[0].reshape(
        dimension, experts, rank
    )
    return np.einsum("ij,djr->idr", root, blocks)


def draw_expert_data(
    experts: int,
    angle: float,
    targets: Targets,
    seed: int,
    *,
    dimension: int,
    rank: int,
    samples: int,
    floor: float = 0.0,
    noise: float = 0.0,
) -> tuple[list[RegressionSamples], np.ndarray]:
    """Draw Gaussian points in E subspaces at ``angle``; return each expert's data and β (E, D).

    Targets are X_i β_i + noise with ‖β_i‖ = 1. targets: β_i in the basis of its subspace is the
    same for all ("shared"), has alternating signs ("opposed") or is independent ("drawn"). floor:
    adds D points floor·e_d to every expert, so that Z_i is invertible. noise: standard deviation.
    """
    generator = np.random.default_rng(seed)
    bases = angled_subspaces(experts, rank, dimension, angle, generator)
    inside = generator.standard_normal((experts, rank))
    if targets == "shared":
        inside = np.tile(inside[:1], (experts, 1))
    elif targets == "opposed":
        signs = np.where(np.arange(experts) % 2 == 1, -1, 1)
        inside = signs[:, None] * inside[:1]
    betas = np.einsum("edr,er->ed", bases, inside / np.linalg.norm(inside, axis=1, keepdims=True))
    if floor:
        extra = floor * np.eye(dimension)
    else:
        extra = np.zeros((0, dimension))
    points = [
        np.concatenate([generator.standard_normal((samples, rank)) @ basis.T, extra])
        for basis in bases
    ]
    return [
        RegressionSamples(x, x @ beta + noise * generator.standard_normal(len(x)))
        for x, beta in zip(points, betas, strict=True)
    ], betas


_TOLERANCE = 1e-9  # relative difference below which singular values, or overlaps, are equal


class LeastSquaresFit(NamedTuple):
    """Least-squares solution of one expert's data."""

    weights: np.ndarray  # (D,), the minimiser of smallest norm
    inverse: np.ndarray  # (D, D) = (XᵀX)⁺
    span: np.ndarray  # (D, rank), orthonormal basis of the span of Xᵀ


class Theorem1Sides(NamedTuple):
    """The two sides of Theorem 1, ‖w*‖² ≥ Σ_i [‖w_i*‖ − ε1‖Xᵀy‖ − ε2 Σ_{j≠i} ‖X_jᵀy_j‖]₊².

    The paper's theorem prints the plus sign at the last norm, without effect; its proof
    (appendix A) prints it at the whole bracket before the square. Only the latter is true: without
    it a negative bracket is squared (``literal``), and E equal points x_i = y_i = 1 would need
    1 = ‖w*‖² ≥ E(2 − 2E)².
    """

    dense: float  # ‖w*‖
    experts: np.ndarray  # (E,) ‖w_i*‖
    epsilon_1: float
    epsilon_2: float
    right: float
    literal: float  # the right-hand side as printed in the theorem

    @property
    def ratio(self) -> float:
        """Return max_i ‖w_i*‖ / ‖w*‖, a ratio of Lipschitz constants; infinite if w* = 0."""
        if self.dense:
            return float(self.experts.max()) / self.dense
        return math.inf

    @property
    def holds(self) -> bool:
        """Return whether the right-hand side is at most ‖w*‖², up to rounding."""
        return self._covers(self.right)

    @property
    def literal_holds(self) -> bool:
        """Return whether the theorem as printed holds, up to rounding."""
        return self._covers(self.literal)

    def _covers(self, right: float) -> bool:
        return right <= self.dense**2 * (1 + 1e-9) + 1e-12 * float(self.experts.max()) ** 2


class Theorem2(NamedTuple):
    """Theorem 2 (appendix D): the smallest γ in (0, 1] with max ‖w_i*‖² ≤ γ‖w*‖² that it proves.

    None if it proves nothing. The text says that Lipschitz constants shrink by γ; the statement is
    about their squares, so they shrink by √γ.
    """

    gamma: float | None  # by the condition on ‖Δ_i‖
    simple: float | None  # by the corollary, ‖Δ_i‖ ≥ 4‖β_i‖/√γ with small residuals
    ratio_squared: float  # max ‖w_i*‖² / ‖w*‖²

    @property
    def holds(self) -> bool:
        """Return whether the measured ratio is within the proved bounds, up to rounding."""
        return all(
            bound is None or self.ratio_squared <= bound * (1 + 1e-9)
            for bound in (self.gamma, self.simple)
        )


def least_squares(part: RegressionSamples) -> LeastSquaresFit:
    """Return the minimiser of ‖Xw − y‖² of smallest norm, by the SVD of X."""
    u, values, right = np.linalg.svd(part.points, full_matrices=False)
    rank = int(
        (values > max(part.points.shape) * np.finfo(float).eps * values.max(initial=0)).sum()
    )
    values = values[:rank]
    span = right[:rank].T
    return LeastSquaresFit(
        span @ (u[:, :rank].T @ part.targets / values), (span / values**2) @ span.T, span
    )


def stack_expert_data(parts: Sequence[RegressionSamples]) -> RegressionSamples:
    """Return the points and targets of all experts, concatenated, as a dense model gets them."""
    return RegressionSamples(
        np.concatenate([part.points for part in parts]),
        np.concatenate([part.targets for part in parts]),
    )


def expert_subspace_bases(parts: Sequence[RegressionSamples]) -> list[np.ndarray]:
    """Return the paper's bases U_i of the experts' subspaces, (D, r_i), orthonormal columns.

    Each singular vector v of XᵀX goes to the expert whose span it overlaps most; in a tie to the
    expert with the largest energy ‖X_i v‖², then to the first. For equal singular values any basis
    of their space is valid. The basis here is aligned with the experts' spans if these are
    orthogonal; an arbitrary basis would mix the experts and make ε1 large, where the paper has 0.
    """
    _, values, right = np.linalg.svd(stack_expert_data(parts).points, full_matrices=False)
    rank = int(
        (
            values > max(len(right), right.shape[1]) * np.finfo(float).eps * values.max(initial=0)
        ).sum()
    )
    spans = [least_squares(part).span for part in parts]
    ends = [
        *(np.flatnonzero(-np.diff(values[:rank]) > _TOLERANCE * values[:1].max(initial=0)) + 1),
        rank,
    ]
    spaces = [
        _align_basis(right[start:end].T, spans)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    vectors = np.concatenate([*spaces, np.zeros((right.shape[1], 0))], axis=1)
    overlap = np.stack([((span.T @ vectors) ** 2).sum(axis=0) for span in spans])
    energy = np.stack([((part.points @ vectors) ** 2).sum(axis=0) for part in parts])
    tied = overlap >= overlap.max(axis=0) - _TOLERANCE
    owner = np.where(
        tied & (energy >= np.where(tied, energy, 0).max(axis=0) * (1 - _TOLERANCE)), 1, 0
    ).argmax(axis=0)
    return [vectors[:, owner == index] for index in range(len(parts))]


def _align_basis(space: np.ndarray, spans: Sequence[np.ndarray]) -> np.ndarray:
    """Return the basis (D, m) of ``space`` that diagonalises the weighted projections of spans."""
    parts = [space.T @ span for span in spans]
    return (
        space
        @ np.linalg.eigh(sum(weight * part @ part.T for weight, part in enumerate(parts, 1)))[1]
    )


def theorem_1_sides(
    parts: Sequence[RegressionSamples], bases: Sequence[np.ndarray] | None = None
) -> Theorem1Sides:
    """Return both sides of Theorem 1 with the smallest ε1 and ε2 of definitions 1 and 2.

    bases: U_i (D, r_i), mutually orthogonal and together a basis of the span of Xᵀ; None: the
    paper's (``expert_subspace_bases``).
    """
    stacked = stack_expert_data(parts)
    experts = [least_squares(part) for part in parts]
    dense = least_squares(stacked)
    if bases is None:
        bases = expert_subspace_bases(parts)
    norms = np.array([np.linalg.norm(expert.weights) for expert in experts])
    epsilon_1 = max(
        _spectral_norm(basis @ (basis.T @ dense.inverse) - expert.inverse)
        for basis, expert in zip(bases, experts, strict=True)
    )
    epsilon_2 = max(
        (_spectral_norm(expert.inverse @ other.span) for expert, other in permutations(experts, 2)),
        default=0.0,
    )
    pulls = np.array([np.linalg.norm(part.points.T @ part.targets) for part in parts])
    brackets = (
        norms
        - epsilon_1 * np.linalg.norm(stacked.points.T @ stacked.targets)
        - epsilon_2 * (pulls.sum() - pulls)
    )
    right = float((np.maximum(brackets, 0) ** 2).sum())
    return Theorem1Sides(
        float(np.linalg.norm(dense.weights)),
        norms,
        epsilon_1,
        epsilon_2,
        right,
        float((brackets**2).sum()),
    )


def theorem_2(
    parts: Sequence[RegressionSamples], betas: Sequence[np.ndarray] | np.ndarray
) -> Theorem2:
    """Return Theorem 2's bounds for y_i = X_i β_i + r_i, and the measured ratio; betas: (E, D)."""
    grams = [part.points.T @ part.points for part in parts]
    if any(np.linalg.matrix_rank(part.points) < part.points.shape[1] for part in parts):
        raise ValueError(
            "theorem_2: every expert needs as many independent points as there are dimensions"
        )
    pulls = [
        part.points.T @ (part.targets - part.points @ beta)
        for part, beta in zip(parts, betas, strict=True)
    ]
    total = sum(grams)
    eta = np.linalg.solve(total, sum(pulls))
    etas = [np.linalg.solve(gram, pull) for gram, pull in zip(grams, pulls, strict=True)]
    shifts = [
        np.linalg.solve(
            total, sum(gram @ (beta - other) for gram, other in zip(grams, betas, strict=True))
        )
        for beta in betas
    ]
    lengths = np.linalg.norm(shifts, axis=1)
    sizes = np.linalg.norm(betas, axis=1)
    weights = np.array(betas) + np.array(etas)
    dense = np.linalg.norm(
        np.linalg.solve(total, sum(part.points.T @ part.targets for part in parts))
    )
    gamma = _smallest_gamma(
        np.linalg.norm(weights, axis=1), lengths - np.linalg.norm(np.array(betas) + eta, axis=1)
    )
    small = np.linalg.norm(eta) <= sizes.min() and (np.linalg.norm(etas, axis=1) <= sizes).all()
    largest = float((weights**2).sum(axis=1).max())
    return Theorem2(
        gamma,
        _smallest_gamma(4 * sizes, lengths) if small else None,
        largest / float(dense) ** 2 if dense else math.inf,
    )


def _smallest_gamma(needed: np.ndarray, room: np.ndarray) -> float | None:
    """Return the smallest γ ≤ 1 with needed_i ≤ √γ · room_i for all i, or None."""
    if (room < needed).any() or (room <= 0).any():
        return None
    return float((needed / room).max() ** 2)


def _spectral_norm(matrix: np.ndarray) -> float:
    if matrix.size:
        return float(np.linalg.norm(matrix, 2))
    return 0.0

"""Data for linear experts: points in subspaces at a given angle, one subspace per expert.

E experts, D dimensions, N_i points of expert i, r rank of a subspace.
"""

import math
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
    """Draw balanced data: Gaussian points in E subspaces at ``angle``; return parts and β (E, D).

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

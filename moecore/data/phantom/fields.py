"""Smooth random fields and interpolation on the 64³ grid of the phantom."""

import numpy as np
from numpy.random import Generator
from scipy import ndimage

SIDE = 64  # voxels along each axis
VOXEL_MM = 3.0
VOXEL_ML = VOXEL_MM**3 / 1000
KNOTS = 8  # control points along each axis, about 38 mm apart
# SD of a cubic B-spline field whose control points have SD 1, measured over the grid
SPLINE_SD = 0.315


def spline_basis(length: int = SIDE, knots: int = KNOTS) -> np.ndarray:
    """Uniform cubic B-splines at ``length`` points: float32 (length, knots); rows sum to 1."""
    place = np.linspace(0, knots - 3 - 1e-6, length)
    first = np.floor(place).astype(int)
    t = place - first
    basis = np.zeros((length, knots), np.float32)
    for offset, weight in enumerate(
        [
            (1 - t) ** 3 / 6,
            (3 * t**3 - 6 * t**2 + 4) / 6,
            (-3 * t**3 + 3 * t**2 + 3 * t + 1) / 6,
            t**3 / 6,
        ]
    ):
        basis[np.arange(length), first + offset] += weight.astype(np.float32)
    return basis


BASIS = spline_basis()


def smooth_fields(random: Generator, number: int = 1) -> np.ndarray:
    """Smooth Gaussian fields with SD near 1: float32 (number, 64, 64, 64)."""
    # (n, 8, 8, 64)
    field = random.standard_normal((number, KNOTS, KNOTS, KNOTS), dtype=np.float32) @ BASIS.T
    field = np.matmul(BASIS, field)  # (n, 8, 64, 64)
    field = np.matmul(BASIS, field.reshape(number, KNOTS, SIDE * SIDE)).reshape(
        number, SIDE, SIDE, SIDE
    )
    return field / np.float32(SPLINE_SD)


def grid_points() -> np.ndarray:
    """Indices of all voxels, float32 (3, 64³), the last axis fastest."""
    return np.indices((SIDE, SIDE, SIDE), np.float32).reshape(3, -1)


def sampled(volume: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Linear interpolation of a volume (64, 64, 64) at points (3, n) in voxels; float32 (n,).

    Outside: the nearest voxel.
    """
    return ndimage.map_coordinates(
        volume, points, order=1, mode="nearest", prefilter=False, output=np.float32
    )

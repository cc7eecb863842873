"""Smooth random fields and interpolation on the phantom's 64³ grid, and the scan they shade."""

import numpy as np
from numpy.random import Generator
from scipy import ndimage

from moecore.data.phantom.anatomy import BIAS, SCAN_LOG_SD, SITE_GAIN, SITE_GAMMA_LOG_SD, SITE_NOISE

SIDE = 64  # voxels along each axis
VOXEL_MM = 3.0
VOXEL_ML = VOXEL_MM**3 / 1000
KNOTS = 8  # control points along each axis, about 38 mm apart
# SD of a cubic B-spline field whose control points have SD 1, measured over the grid
SPLINE_SD = 0.315


def spline_basis() -> np.ndarray:
    """Uniform cubic B-splines at SIDE points: float32 (SIDE, KNOTS); rows sum to 1."""
    place = np.linspace(0, KNOTS - 3 - 1e-6, SIDE)
    first = np.floor(place).astype(int)
    t = place - first
    pieces = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    basis = np.zeros((SIDE, KNOTS), np.float32)
    for offset, piece in enumerate(pieces):
        basis[np.arange(SIDE), first + offset] = piece / 6
    return basis


BASIS = spline_basis()


def smooth_fields(random: Generator, number: int = 1) -> np.ndarray:
    """Smooth Gaussian fields with SD near 1: float32 (number, 64, 64, 64)."""
    field = random.standard_normal((number, KNOTS, KNOTS, KNOTS), dtype=np.float32) @ BASIS.T
    field = np.matmul(BASIS, field)  # (n, 8, 64, 64)
    field = np.matmul(BASIS, field.reshape(number, KNOTS, SIDE * SIDE))
    return field.reshape(number, SIDE, SIDE, SIDE) / np.float32(SPLINE_SD)


def grid_points() -> np.ndarray:
    """Indices of all voxels, float32 (3, 64³), the last axis fastest."""
    return np.indices((SIDE, SIDE, SIDE), np.float32).reshape(3, -1)


def interpolate_volume(volume: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Linear interpolation of a volume (64, 64, 64) at points (3, n) in voxels; float32 (n,)."""
    return ndimage.map_coordinates(
        volume, points, order=1, mode="nearest", prefilter=False, output=np.float32
    )


def scan_brain(
    brightness: np.ndarray, mask: np.ndarray, seed: int, scan: int, site: int
) -> np.ndarray:
    """One scan of a brain: float32 (D, H, W), positive inside ``mask`` and exactly 0 outside.

    It has its site's brightness and contrast, smooth shading, and Rician noise. seed and scan: the
    person's and which of his scans, in random streams that do not touch that of the anatomy.
    """
    random = np.random.default_rng([seed, 2, scan])
    scanner = np.random.default_rng([site, 77])
    gain = scanner.uniform(*SITE_GAIN)
    gamma = float(np.exp(scanner.normal(0, SITE_GAMMA_LOG_SD)))
    noise = scanner.uniform(*SITE_NOISE) * gain
    shading = np.exp(BIAS * smooth_fields(random)[0] + random.normal(0, SCAN_LOG_SD))
    real, imaginary = random.standard_normal((2, mask.sum()), dtype=np.float32) * np.float32(noise)
    signal = np.clip(brightness, 0, None) ** gamma * shading * gain
    image = np.zeros(brightness.shape, np.float32)
    image[mask] = np.hypot(signal[mask] + real, imaginary)
    return image

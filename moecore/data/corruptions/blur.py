"""Corruptions by blur.

Image fp64 (C, H, W) in [0, 1], severity 1 to 5. Outside the image is the nearest pixel.
"""

import math

import numpy as np
from scipy.ndimage import correlate, gaussian_filter

from moecore.data.corruptions import (
    sample_bilinear,
    severity_length,
    severity_parameter,
)

ZOOMS = 11  # enlargements that are averaged


def defocus_blur(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Mean over a disk; the parameter is its radius in pixels."""
    return apply_kernel(
        image,
        disk_kernel(severity_length(image, severity, (0.7, 0.9, 1.1, 1.4, 1.8), (3, 4, 6, 8, 10))),
    )


def glass_blur(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Blur, swap every pixel with a random neighbour some times over, blur again.

    Parameters: the blur's sigma and the farthest swap in pixels; as many sweeps as the severity,
    for in a small image, where a swap reaches one pixel, it is the sweeps that make it stronger.
    Unlike in the benchmark, the border takes part.
    """
    sigma = severity_length(
        image, severity, (0.25, 0.3, 0.32, 0.35, 0.4), (0.7, 0.9, 1.0, 1.1, 1.5)
    )
    reach = round(severity_length(image, severity, (1, 1, 1, 1, 1), (1, 1, 2, 2, 3)))
    order = local_shuffle_order(image.shape[-2:], reach, severity, random)
    mixed = gaussian_smooth(image, sigma).reshape(len(image), -1)[:, order].reshape(image.shape)
    return gaussian_smooth(mixed, sigma)


def motion_blur(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """A trail of falling weight between −45° and 45°; the parameter is its sigma in pixels."""
    sigma = severity_length(image, severity, (1, 1.5, 2, 2.5, 3.2), (3, 5, 8, 12, 15))
    return apply_kernel(image, trail_kernel(sigma, random.uniform(-45, 45)))


def zoom_blur(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Mean of the image and of enlargements about its centre; the parameter is the largest."""
    largest = severity_parameter(
        image, severity, (1.05, 1.1, 1.15, 1.2, 1.25), (1.1, 1.15, 1.2, 1.25, 1.3)
    )
    middles = [(number - 1) / 2 for number in image.shape[-2:]]
    total = image.copy()
    for zoom in np.linspace(1, largest, ZOOMS):
        places = (
            middle + (np.arange(number) - middle) / zoom
            for middle, number in zip(middles, image.shape[-2:], strict=True)
        )
        total += sample_bilinear(image, *places)
    return total / (ZOOMS + 1)


def apply_kernel(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Every channel of (C, H, W) under one kernel (h, w)."""
    return correlate(image, kernel[None], mode="nearest")


def gaussian_smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of every channel."""
    return gaussian_filter(image, (0, sigma, sigma), mode="nearest")


def disk_kernel(radius: float) -> np.ndarray:
    """A disk of sum 1 whose weights fall from 1 to 0 between radius ± half a pixel."""
    reach = math.ceil(radius)
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    weights = np.clip(radius + 0.5 - np.hypot(rows, columns), 0, 1)
    return weights / weights.sum()


def trail_kernel(sigma: float, degrees: float) -> np.ndarray:
    """Return half a line from the centre, weights exp(−t² / 2σ²) up to 3σ in half pixels, sum 1.

    degrees: 0 points to the right, 90 down. Each point is shared by its four nearest pixels.
    """
    reach = math.ceil(3 * sigma) + 1
    steps = np.arange(0, 3 * sigma, 0.5)
    weights = np.exp(-((steps / sigma) ** 2) / 2)
    angle = math.radians(degrees)
    rows = reach + steps * math.sin(angle)
    columns = reach + steps * math.cos(angle)
    top = rows.astype(int)
    left = columns.astype(int)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for down in (0, 1):
        for right in (0, 1):
            part = np.abs(1 - down - (rows - top)) * np.abs(1 - right - (columns - left))
            np.add.at(kernel, (top + down, left + right), weights * part)
    return kernel / kernel.sum()


def local_shuffle_order(
    size: tuple[int, int], reach: int, sweeps: int, random: np.random.Generator
) -> list[int]:
    """Return where each pixel comes from, flat, after swaps at most ``reach`` pixels away."""
    order = list(range(size[0] * size[1]))
    rows, columns = (axis.ravel() for axis in np.indices(size))
    for _ in range(sweeps):
        down, right = random.integers(-reach, reach + 1, (2, len(order)))
        others = np.clip(rows + down, 0, size[0] - 1) * size[1] + np.clip(
            columns + right, 0, size[1] - 1
        )
        for here, there in enumerate(others.tolist()):
            order[here], order[there] = order[there], order[here]
    return order

"""How strong a corruption is at a severity, for any image size, and two shared resamplings.

The benchmark has two sets of numbers: for 224 pixels (ImageNet-C) and for 32 pixels (CIFAR-10-C),
the latter milder, because a small image has no pixels to spare. Each parameter here has both;
between them it is interpolated geometrically in the image's shorter side. Below 32 pixels the
numbers of 32 stay; above 224 lengths grow with the side.
"""

import math

import numpy as np

# sides in pixels to which the two sets of numbers belong
SMALL = 32
LARGE = 224
PerSeverity = tuple[float, float, float, float, float]  # one value a severity, 1 to 5; all positive


def severity_parameter(
    image: np.ndarray, severity: int, small: PerSeverity, large: PerSeverity
) -> float:
    """A parameter without a unit of length, of an image (C, H, W)."""
    place = math.log(shorter_side(image) / SMALL) / math.log(LARGE / SMALL)
    low = small[severity - 1]
    high = large[severity - 1]
    return low * (high / low) ** min(max(place, 0.0), 1.0)


def severity_length(
    image: np.ndarray, severity: int, small: PerSeverity, large: PerSeverity
) -> float:
    """A parameter in pixels, of an image (C, H, W)."""
    return severity_parameter(image, severity, small, large) * max(1.0, shorter_side(image) / LARGE)


def shorter_side(image: np.ndarray) -> int:
    """The shorter side in pixels."""
    return min(image.shape[-2:])


def sample_bilinear(image: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Bilinear samples (C, h, w) of an image (C, H, W) at fractional ``rows`` (h,) and ``columns``
    (w,); outside is the nearest pixel.

    Position 0 is the centre of the first pixel.
    """
    return _interpolate_along(_interpolate_along(image, rows, -2), columns, -1)


def _interpolate_along(image: np.ndarray, where: np.ndarray, axis: int) -> np.ndarray:
    where = np.clip(where, 0, image.shape[axis] - 1)
    low = np.minimum(where.astype(int), max(image.shape[axis] - 2, 0))
    if axis == -2:
        part = (where - low)[:, None]
    else:
        part = where - low
    return (
        np.take(image, low, axis) * (1 - part)
        + np.take(image, np.minimum(low + 1, image.shape[axis] - 1), axis) * part
    )


def cloud_field(
    size: tuple[int, int], roughness: float, random: np.random.Generator, cells: int = 1
) -> np.ndarray:
    """A random height field (H, W) from 0 to 1: sums of smooth noise whose grids get finer by 2 and
    whose heights shrink by ``roughness``.

    cells: of the coarsest grid along each side; the finest has cells of about a pixel.
    """
    field = np.zeros(size)
    height = 1.0
    while cells <= max(size):
        grid = random.uniform(-1, 1, (1, cells + 1, cells + 1))
        field += (
            height * sample_bilinear(grid, *(np.linspace(0, cells, number) for number in size))[0]
        )
        cells = cells * 2
        height = height / roughness
    return (field - field.min()) / (field.max() - field.min())

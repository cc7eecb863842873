"""Affines (B, 3, 3) of a batch, drawn on the CPU in fp64.

An affine maps a point (row, column, 1) of the original image to the view; pixel centres are at
+0.5. Later maps multiply from the left.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moecore.core.streams import BatchDraws


def uniform_draws(draws: BatchDraws, low: float, high: float) -> Tensor:
    """(B,) fp64, uniform in [low, high)."""
    return low + (high - low) * draws.rand(dtype=torch.float64)


def affines_from_matrix_rows(rows: tuple, columns: tuple, count: int) -> Tensor:
    """(count, 3, 3) with first row ``rows``, second row ``columns`` and third row 0 0 1."""
    full = torch.zeros(count, 3, 3, dtype=torch.float64)
    for line, entries in enumerate((rows, columns, (0, 0, 1))):
        for place, entry in enumerate(entries):
            full[:, line, place] = entry
    return full


def scaling_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """Scale about the corner (0, 0)."""
    return affines_from_matrix_rows((rows, 0, 0), (0, columns, 0), count)


def translation_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """Move by ``rows`` down and ``columns`` to the right, in pixels."""
    return affines_from_matrix_rows((1, 0, rows), (0, 1, columns), count)


def rotation_affines(radians: Tensor) -> Tensor:
    """Turn about the corner (0, 0) by ``radians`` (B,), counter-clockwise on the screen."""
    cosine = radians.cos()
    sine = radians.sin()
    return affines_from_matrix_rows((cosine, -sine, 0), (sine, cosine, 0), len(radians))


def shearing_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """row += rows · column; column += columns · row."""
    return affines_from_matrix_rows((1, rows, 0), (columns, 1, 0), count)


def flip_affines(mirrored: Tensor, width: float) -> Tensor:
    """Mirror left and right where ``mirrored`` (B,) is true."""
    sign = 1.0 - 2.0 * mirrored.to(torch.float64)
    return affines_from_matrix_rows(
        (1, 0, 0), (0, sign, width * mirrored.to(torch.float64)), len(mirrored)
    )


def recentre_affines(affines: Tensor, height: float, width: float) -> Tensor:
    """Return the same linear maps about the middle of a (height, width) image."""
    count = len(affines)
    return (
        translation_affines(height / 2, width / 2, count)
        @ affines
        @ translation_affines(-height / 2, -width / 2, count)
    )


def draw_crop_windows(
    draws: BatchDraws,
    size: Sequence[int] | tuple[Tensor, Tensor],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random windows as (top, left, height, width), each (B,) in pixels, fractions allowed.

    size: height and width of all images, or fp64 (B,) of each.

    Area uniform in ``scale`` (share of the image), width / height log-uniform in ``ratio``; a side
    longer than the image's is cut to it (our choice: Inception's rule draws again up to ten times).
    Position uniform among those that lie inside.
    """
    area = uniform_draws(draws, *scale) * (size[0] * size[1])
    aspect = uniform_draws(draws, math.log(ratio[0]), math.log(ratio[1])).exp()
    height = (area / aspect).sqrt().clamp(max=size[0])
    width = (area * aspect).sqrt().clamp(max=size[1])
    top = (size[0] - height) * uniform_draws(draws, 0, 1)
    left = (size[1] - width) * uniform_draws(draws, 0, 1)
    return top, left, height, width


def invert_affines(affines: Tensor) -> Tensor:
    """Inverse of affines (B, 3, 3), in closed form."""
    (a, b, t), (c, d, u) = (line.unbind(-1) for line in affines[:, :2].unbind(1))
    scale = 1 / (a * d - b * c)
    return affines_from_matrix_rows(
        (d * scale, -b * scale, (b * u - d * t) * scale),
        (-c * scale, a * scale, (c * t - a * u) * scale),
        len(affines),
    )

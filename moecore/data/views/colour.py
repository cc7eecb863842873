"""Colour operations on a batch: pixels fp32 (n, C, H, W) in 0..255, strength (n, 1, 1, 1).

Each follows PIL's ImageOps or ImageEnhance of the same name to within one grey level (PIL truncates
to whole levels, these do not); posterize, solarize, invert and equalize are exact on whole levels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # ITU-R 601, as PIL


def brightness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 the image."""
    return (pixels * factor).clamp(0, 255)


def contrast(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey of the image, rounded to a whole level."""
    return _blend(_grey(pixels).mean((1, 2, 3), keepdim=True).add(0.5).floor(), pixels, factor)


def saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image (PIL: Color); grey images stay as they are."""
    if pixels.shape[1] == 1:
        return pixels
    return _blend(_grey(pixels), pixels, factor)


def sharpness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13, rounded to whole levels; the
    outermost pixels stay as they are.
    """
    smooth = pixels.clone()
    smooth[..., 1:-1, 1:-1] = (
        (F.avg_pool2d(pixels, 3, 1) * 9 + 4 * pixels[..., 1:-1, 1:-1]) / 13 + 0.5
    ).floor()
    return _blend(smooth, pixels, factor)


def posterize(pixels: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` bits (1 to 8) of each level."""
    step = 2.0 ** (8 - bits)
    return (pixels.round() / step).floor() * step


def solarize(pixels: Tensor, threshold: Tensor) -> Tensor:
    """Invert the levels from ``threshold`` on."""
    return torch.where(pixels < threshold, pixels, 255 - pixels)


def invert(pixels: Tensor, strength: Tensor) -> Tensor:
    """The negative."""
    return 255 - pixels


def identity(pixels: Tensor, strength: Tensor) -> Tensor:
    """The image itself."""
    return pixels


def autocontrast(pixels: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel of one level stays as it is."""
    low = pixels.amin((2, 3), keepdim=True)
    high = pixels.amax((2, 3), keepdim=True)
    return torch.where(
        high > low, (pixels - low) * (255 / (high - low).clamp(min=1e-6)), pixels
    ).clamp(0, 255)


def equalize(pixels: Tensor, strength: Tensor) -> Tensor:
    """Equalise the histogram of each channel; pixels are rounded to whole levels first."""
    levels = pixels.round().to(torch.int64).flatten(2).flatten(0, 1)
    histogram = torch.zeros(len(levels), 256, dtype=torch.int64, device=pixels.device).scatter_add_(
        1, levels, torch.ones_like(levels)
    )
    last = histogram.gather(1, levels.amax(1, keepdim=True))
    step = (levels.shape[1] - last) // 255
    table = ((histogram.cumsum(1) - histogram + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=pixels.device))
    return table.gather(1, levels).view_as(pixels).to(pixels.dtype)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] == 1:
        return pixels
    return (
        (pixels[:, :1] * LUMA[0] + pixels[:, 1:2] * LUMA[1] + pixels[:, 2:] * LUMA[2])
        .add(0.5)
        .floor()
    )


def _blend(other: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    return (other + (pixels - other) * factor).clamp(0, 255)

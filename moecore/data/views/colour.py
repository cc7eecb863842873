"""Colour operations on a batch: pixels fp32 (n, C, H, W) in 0..255, strength (n, 1, 1, 1).

Each follows PIL's ImageOps or ImageEnhance of the same name to within one grey level (PIL truncates
to whole levels, these do not); posterize, solarize, invert and equalize are exact on whole levels.
Colour jitter and erasing, which draw for themselves, stand at the end.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.streams import BatchDraws
from moecore.data.views import warping
from moecore.data.views.warping import to_device_async

LUMA = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # ITU-R 601, as PIL


def adjust_brightness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 the image."""
    return (pixels * factor).clamp(0, 255)


def adjust_contrast(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey of the image, rounded to a whole level."""
    return _blend(_grey(pixels).mean((1, 2, 3), keepdim=True).add(0.5).floor(), pixels, factor)


def adjust_saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image (PIL: Color); grey images stay as they are."""
    if pixels.shape[1] == 1:
        return pixels
    return _blend(_grey(pixels), pixels, factor)


def adjust_sharpness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13; its rim stays."""
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


class ColourJitter(Config):
    """ColorJitter without hue: factors uniform in 1 ± value (≥ 0), in random order, per image."""

    brightness: float = Field(0.0, ge=0, description="Blended with black; 0 leaves it out")
    contrast: float = Field(0.0, ge=0, description="Blended with the mean grey; 0 leaves it out")
    saturation: float = Field(
        0.0, ge=0, description="Blended with the grey image; 0 leaves it out, as a grey image does"
    )

    @property
    def is_identity(self) -> bool:
        """Return whether no colour is changed."""
        return not (self.brightness or self.contrast or self.saturation)


JITTERED = (adjust_brightness, adjust_contrast, adjust_saturation)


class DrawnJitter(NamedTuple):
    """Of B images: order of JITTERED (B, 3), and factors fp64 (B, 3)."""

    order: Tensor
    factors: Tensor


def draw_jitter(settings: ColourJitter, draws: BatchDraws) -> DrawnJitter:
    """The draws of each image, on the CPU."""
    order = draws.rand(len(JITTERED)).argsort(dim=1)
    factors = [
        warping.uniform_draws(draws, max(0.0, 1 - value), 1 + value)
        for value in (settings.brightness, settings.contrast, settings.saturation)
    ]
    return DrawnJitter(order, torch.stack(factors, dim=1))


def jitter_colours(pixels: Tensor, drawn: DrawnJitter) -> Tensor:
    """Pixels fp32 (B, C, H, W) in 0..255, changed in place and returned."""
    for place in range(len(JITTERED)):
        for index, operation in enumerate(JITTERED):
            # on the CPU: the device is never waited for
            chosen = (drawn.order[:, place] == index) & (drawn.factors[:, index] != 1)
            rows = chosen.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            factors = drawn.factors[rows, index].to(torch.float32).view(-1, 1, 1, 1)
            where = to_device_async(rows, pixels.device)
            changed = operation(
                pixels.index_select(0, where), to_device_async(factors, pixels.device)
            )
            pixels.index_copy_(0, where, changed)
    return pixels


def erase_rectangles(pixels: Tensor, probability: float, draws: BatchDraws) -> Tensor:
    """Black out a rectangle per chosen image (Zhong et al. 2020): 2 to 33 % of the area."""
    height, width = pixels.shape[-2:]
    top, left, tall, wide = warping.draw_crop_windows(
        draws, (height, width), (0.02, 1 / 3), (0.3, 3.3)
    )
    chosen = draws.rand() < probability
    rows = torch.arange(height) + 0.5
    columns = torch.arange(width) + 0.5
    in_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None]) & chosen[:, None]
    in_columns = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    tall_part = to_device_async(in_rows, pixels.device)[:, None, :, None]
    wide_part = to_device_async(in_columns, pixels.device)[:, None, None, :]
    return pixels.masked_fill_(tall_part & wide_part, 0.0)

"""Colour operations on batches of images, and RandAugment (Cubuk et al. 2020).

Pixels fp32 (n, C, H, W) in 0..255, strength (n, 1, 1, 1). Each colour operation follows PIL's
ImageOps or ImageEnhance of the same name to within one grey level (PIL truncates to whole levels,
these do not); posterize, solarize, invert and equalize are exact on whole levels. RandAugment's
geometric operations join the view's affine; colours are applied to subsets of the batch.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moecore.core import config, streams
from moecore.data.views import warping

Operation = Callable[[Tensor, Tensor], Tensor]  # of pixels and strengths
LUMA = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # ITU-R 601, as PIL


def adjust_brightness(pixels: Tensor, factor: Tensor) -> Tensor:
    return (pixels * factor).clamp(0, 255)


def adjust_contrast(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey, a whole level; factor: 0 is grey, 1 the unchanged image."""
    return _blend(_grey(pixels).mean((1, 2, 3), keepdim=True).add(0.5).floor(), pixels, factor)


def adjust_saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image (PIL: Color); grey images do not change."""
    if pixels.shape[1] == 1:
        return pixels
    return _blend(_grey(pixels), pixels, factor)


def adjust_sharpness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13, except at its border."""
    smooth = pixels.clone()
    summed = F.avg_pool2d(pixels, 3, 1) * 9 + 4 * pixels[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = (summed / 13 + 0.5).floor()
    return _blend(smooth, pixels, factor)


def posterize(pixels: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` bits (1 to 8) of each pixel value."""
    step = 2.0 ** (8 - bits)
    return (pixels.round() / step).floor() * step


def solarize(pixels: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(pixels < threshold, pixels, 255 - pixels)


def invert(pixels: Tensor, strength: Tensor) -> Tensor:
    return 255 - pixels


def autocontrast(pixels: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel with a single level does not change."""
    low = pixels.amin((2, 3), keepdim=True)
    high = pixels.amax((2, 3), keepdim=True)
    stretched = (pixels - low) * (255 / (high - low).clamp(min=1e-6))
    return torch.where(high > low, stretched, pixels).clamp(0, 255)


def equalize(pixels: Tensor, strength: Tensor) -> Tensor:
    """Equalise the histogram of each channel; pixels are rounded to whole levels first."""
    levels = pixels.round().to(torch.int64).flatten(2).flatten(0, 1)
    histogram = torch.zeros(len(levels), 256, dtype=torch.int64, device=pixels.device)
    histogram.scatter_add_(1, levels, torch.ones_like(levels))
    step = (levels.shape[1] - histogram.gather(1, levels.amax(1, keepdim=True))) // 255
    table = ((histogram.cumsum(1) - histogram + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=pixels.device))
    return table.gather(1, levels).view_as(pixels).to(pixels.dtype)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] == 1:
        return pixels
    luma = pixels[:, :1] * LUMA[0] + pixels[:, 1:2] * LUMA[1] + pixels[:, 2:] * LUMA[2]
    return luma.add(0.5).floor()


def _blend(other: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    return (other + (pixels - other) * factor).clamp(0, 255)


class ColourJitter(config.Config):
    """ColorJitter of torchvision without hue: factors uniform in 1 ± value, in random order."""

    brightness: float = Field(0.0, ge=0, description="Blend with black; 0: off")
    contrast: float = Field(0.0, ge=0, description="Blend with the mean grey; 0: off")
    saturation: float = Field(0.0, ge=0, description="Blend with grey, if coloured; 0: off")

    @property
    def is_identity(self) -> bool:
        return not (self.brightness or self.contrast or self.saturation)


JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation)


class DrawnJitter(NamedTuple):
    order: Tensor  # (B, 3), of the operations JITTER_OPERATIONS
    factors: Tensor  # (B, 3)


def draw_jitter(settings: ColourJitter, draws: streams.BatchDraws) -> DrawnJitter:
    order = draws.rand(len(JITTER_OPERATIONS)).argsort(dim=1)
    values = (settings.brightness, settings.contrast, settings.saturation)
    factors = [warping.uniform_draws(draws, max(0.0, 1 - value), 1 + value) for value in values]
    return DrawnJitter(order, torch.stack(factors, dim=1))


def jitter_colours_in_place(pixels: Tensor, jitter: DrawnJitter) -> Tensor:
    """Change colours of pixels fp32 (B, C, H, W) in 0..255; return the same tensor."""
    for place in range(len(JITTER_OPERATIONS)):
        for index, operation in enumerate(JITTER_OPERATIONS):
            chosen = (jitter.order[:, place] == index) & (jitter.factors[:, index] != 1)
            _change_in_place(pixels, chosen, operation, jitter.factors[:, index])
    return pixels


def _change_in_place(pixels: Tensor, mask: Tensor, operation: Operation, strengths: Tensor) -> None:
    """Apply an operation to the images where ``mask`` (B,) is True; strengths: (B,)."""
    # Rows are selected on the CPU, so that nothing waits for the device.
    rows = mask.nonzero()[:, 0]
    if len(rows):
        values = warping.to_device_async(strengths[rows].to(torch.float32), pixels.device)
        rows = warping.to_device_async(rows, pixels.device)
        changed = operation(pixels.index_select(0, rows), values.view(-1, 1, 1, 1))
        pixels.index_copy_(0, rows, changed)


def erase_rectangles_in_place(pixels: Tensor, chance: float, draws: streams.BatchDraws) -> Tensor:
    """Set a random rectangle of an image to 0, with this chance each (Zhong et al. 2020)."""
    height, width = pixels.shape[-2:]
    windows = warping.draw_crop_windows(draws, (height, width), (0.02, 1 / 3), (0.3, 3.3))
    first_row, first_column, box_height, box_width = (part[:, None] for part in windows)
    chosen = draws.rand()[:, None] < chance
    rows = torch.arange(height) + 0.5
    columns = torch.arange(width) + 0.5
    in_rows = (rows >= first_row) & (rows < first_row + box_height) & chosen
    in_columns = (columns >= first_column) & (columns < first_column + box_width)
    row_mask = warping.to_device_async(in_rows, pixels.device)[:, None, :, None]
    column_mask = warping.to_device_async(in_columns, pixels.device)[:, None, None, :]
    return pixels.masked_fill_(row_mask & column_mask, 0.0)


Geometric = Literal["shear_x", "shear_y", "translate_x", "translate_y", "rotate"]
Colour = Literal[
    "identity",
    "autocontrast",
    "equalize",
    "brightness",
    "contrast",
    "saturation",
    "sharpness",
    "posterize",
    "solarize",
    "invert",
]
STRENGTHLESS = frozenset({"autocontrast", "equalize", "invert"})  # independent of the magnitude
DEFAULTS = (*get_args(Geometric), *(name for name in get_args(Colour) if name != "invert"))


class RandAugment(config.Config):
    """RandAugment's settings: number of random operations per image, and their strength.

    At magnitude 10: shear 0.3, translation 45 % of the side, rotation 30°, enhancement factors 1 ±
    0.9, 4 bits, threshold 0; other magnitudes in proportion. Signs are random. Geometric operations
    are about the image's centre and come before all colours (our choice).
    """

    operations: int = Field(2, ge=0, le=16, description="Operations per image, with replacement")
    magnitude: float = Field(9, ge=0, le=30, description="Strength; 10: the full range of each")
    names: tuple[Geometric | Colour, ...] = Field(
        DEFAULTS, min_length=1, description="Operations to draw from; all but invert by default"
    )

    @property
    def is_identity(self) -> bool:
        names = set(self.names) - {"identity"}
        return not self.operations or not (names if self.magnitude else names & STRENGTHLESS)

    @property
    def moves(self) -> bool:
        return any(name in get_args(Geometric) for name in self.names)


class DrawnOperations(NamedTuple):
    names: tuple[str, ...]
    choices: Tensor  # (B, operations), positions in ``names``
    levels: Tensor  # (B, operations), signed strengths; 1: magnitude 10


def draw_operations(settings: RandAugment, draws: streams.BatchDraws) -> DrawnOperations:
    choices = draws.integers(0, len(settings.names), settings.operations)
    signs = draws.integers(0, 2, settings.operations) * 2 - 1
    levels = signs.to(torch.float64) * (settings.magnitude / 10)
    return DrawnOperations(settings.names, choices, levels)


def operation_affines(operations: DrawnOperations, height: float, width: float) -> Tensor:
    """Return each image's affine, fp64 (B, 3, 3), the product of its geometric operations."""
    count = len(operations.choices)
    total = torch.eye(3, dtype=torch.float64).expand(count, 3, 3)
    for place in range(operations.choices.shape[1]):
        levels = operations.levels[:, place]
        level = {
            name: torch.where(_drawn_operation_mask(operations, place, name), levels, 0.0)
            for name in get_args(Geometric)
        }
        shear = warping.shearing_affines(0.3 * level["shear_y"], 0.3 * level["shear_x"], count)
        down, right = 0.45 * height * level["translate_y"], 0.45 * width * level["translate_x"]
        move = warping.translation_affines(down, right, count)
        turn = warping.rotation_affines(math.radians(30) * level["rotate"])
        # At most one of the three is not the identity.
        total = warping.recentre_affines(move @ turn @ shear, height, width) @ total
    return total


def apply_colour_operations_in_place(pixels: Tensor, operations: DrawnOperations) -> Tensor:
    """Change pixels fp32 (B, C, H, W) in 0..255 by the drawn operations; return the same tensor."""
    for place in range(operations.choices.shape[1]):
        for name in (name for name in dict.fromkeys(operations.names) if name in COLOUR_OPERATIONS):
            operation, strength = COLOUR_OPERATIONS[name]
            chosen = _drawn_operation_mask(operations, place, name)
            _change_in_place(pixels, chosen, operation, strength(operations.levels[:, place]))
    return pixels


def _drawn_operation_mask(operations: DrawnOperations, place: int, name: str) -> Tensor:
    if name not in operations.names:
        return torch.zeros(len(operations.choices), dtype=torch.bool)
    return operations.choices[:, place] == operations.names.index(name)


def _enhance_factor(levels: Tensor) -> Tensor:
    return (1 + 0.9 * levels).clamp(min=0)


COLOUR_OPERATIONS: dict[str, tuple[Operation, Callable[[Tensor], Tensor]]] = {
    "autocontrast": (autocontrast, torch.abs),
    "equalize": (equalize, torch.abs),
    "invert": (invert, torch.abs),
    "brightness": (adjust_brightness, _enhance_factor),
    "contrast": (adjust_contrast, _enhance_factor),
    "saturation": (adjust_saturation, _enhance_factor),
    "sharpness": (adjust_sharpness, _enhance_factor),
    "posterize": (posterize, lambda levels: (8 - 4 * levels.abs()).round().clamp(1, 8)),
    "solarize": (solarize, lambda levels: (256 * (1 - levels.abs())).clamp(min=0)),
}

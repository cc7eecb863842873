"""Random views of a batch, made on its device, with their exact affines (volumes: views3d).

B images, C channels, H×W pixels, as many in a view. Every random number comes from the CPU
generator that is passed in, so a view is a function of (seed, step) on every device.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Generator, Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.streams import BatchDraws
from moecore.data.views import augmentations, warping
from moecore.data.views.augmentations import ColourJitter, RandAugment
from moecore.data.views.views3d import make_random_volume_views
from moecore.data.views.warping import (
    MixedSizeImageList,
    image_and_view_sizes,
    shift_and_flip,
    to_device_async,
    warp_images,
    warp_uneven_images,
)

CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a crop: lowest, highest
UNEVEN_REFUSAL = "the images are kept whole (short_side); allowed: a crop, as {scale: [0.08, 1.0]}"


class CropRanges(Config):
    """Random resized crop."""

    scale: tuple[float, float] = Field(
        (0.5, 1.0), description="Area of the crop, as a share of the image: lowest, highest"
    )

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        return _check_range(scale, 1.0)


class AffineRanges(Config):
    """Random affine about the centre: scale and shear, rotation, translation."""

    degrees: float = Field(
        0.0, ge=0, le=180, description="Largest rotation; of volumes about each of three axes"
    )
    translate: float = Field(
        0.0, ge=0, le=1, description="Movement along each axis, up to this share of the side"
    )
    scale: tuple[float, float] = Field(
        (1.0, 1.0), description="Factor on both sides: lowest, highest"
    )
    shear: float = Field(
        0.0, ge=0, lt=45, description="Shear along the columns, ± this many degrees; images only"
    )

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        return _check_range(scale, math.inf)

    @property
    def is_identity(self) -> bool:
        """Return whether no image is moved."""
        return not (self.degrees or self.translate or self.shear) and self.scale == (1, 1)


class ViewSettings(Config):
    """What a training view may be; the order is shift, crop, flip, affine, RandAugment's geometry,
    its colours, jitter, erasing.

    The default changes nothing. All geometry is one affine and one linear sampling; shifts and
    flips alone keep every pixel exact. Volumes take shift, flip (of their first axis, which runs
    from left to right), affine without shear, and fill.
    """

    shift: int = Field(
        0, ge=0, description="Move by up to this many whole pixels along each axis (pad and crop)"
    )
    crop: CropRanges | None = Field(None, description="Random resized crop")
    flip: bool = Field(False, description="Mirror left and right with probability one half")
    affine: AffineRanges | None = Field(None, description="Random affine")
    randaugment: RandAugment | None = Field(
        None, description="RandAugment: number of operations and magnitude"
    )
    jitter: ColourJitter | None = Field(
        None, description="Random brightness, contrast and saturation"
    )
    erasing: float = Field(
        0.0, ge=0, le=1, description="Probability of a black rectangle of 2 to 33 % of the view"
    )
    fill: Literal["zeros", "border", "reflection"] = Field(
        "zeros", description="Outside the image: black, the nearest pixel, the mirror image"
    )

    @property
    def leaves_image(self) -> bool:
        """Return whether views show, or interpolate with, what lies outside of the image."""
        moves = self.randaugment is not None and self.randaugment.moves
        return bool(self.shift or self.crop or self.affine or moves)

    @property
    def on_grid(self) -> bool:
        """Whether views are whole-pixel moves and flips only, so that nothing is interpolated."""
        return not (self.crop or self.affine or (self.randaugment and self.randaugment.moves))


class ViewsWithAffines(NamedTuple):
    """Views fp32 (B, C, H, W) in [0, 1] and affines fp32 (B, 3, 3) to them, on their device.

    Of volumes: (B, C, D, H, W) and (B, 4, 4).
    """

    images: Tensor
    affines: Tensor


def make_random_views(
    images: Tensor | MixedSizeImageList, settings: ViewSettings, source: Generator | BatchDraws
) -> ViewsWithAffines:
    """One random view of each image.

    images: uint8 (B, C, H, W) on any device; volumes floating point (B, C, D, H, W) in [0, 1];
    images of different shapes, of which there must be a crop.
    source: a generator on the CPU, or the draws of these images. Raises UserError for settings
    that have no meaning for volumes or for uneven images.
    """
    draws = BatchDraws.of(source, len(images))
    if isinstance(images, Tensor) and images.ndim == 5:
        return ViewsWithAffines(*make_random_volume_views(images, settings, draws))
    count = len(images)
    if isinstance(images, MixedSizeImageList) and settings.crop is None:
        raise UserError(f"views: found crop: null, but {UNEVEN_REFUSAL}")
    original, size = image_and_view_sizes(images)
    shifts = draws.integers(-settings.shift, settings.shift + 1, 2)
    frame = _frame_affines(settings, original, size, draws)
    # drawn whether or not it is used: a setting then changes no other draw
    mirrored = draws.rand() < (0.5 if settings.flip else 0.0)
    moved = warping.translation_affines(shifts[:, 0], shifts[:, 1], count)
    affines = warping.flip_affines(mirrored, size[1]) @ frame @ moved
    if settings.affine:
        affines = _affine(settings.affine, size, draws) @ affines
    drawn = None
    if settings.randaugment:
        drawn = augmentations.draw_operations(settings.randaugment, draws)
        if settings.randaugment.moves:
            affines = augmentations.operation_affines(drawn, *size) @ affines
    if isinstance(images, MixedSizeImageList):
        pixels = warp_uneven_images(images, affines, size, settings.fill)
    elif settings.on_grid:
        pixels = shift_and_flip(images, shifts, mirrored, settings.fill).to(torch.float32)
    else:
        pixels = warp_images(images, affines, size, settings.fill)
    if drawn:
        pixels = augmentations.apply_colour_operations(pixels, drawn)
    if settings.jitter:
        pixels = augmentations.jitter_colours(
            pixels, augmentations.draw_jitter(settings.jitter, draws)
        )
    pixels = pixels.mul_(1 / 255).clamp_(0, 1)  # interpolation may exceed 1 by rounding
    if settings.erasing:
        pixels = augmentations.erase_rectangles(pixels, settings.erasing, draws)
    return ViewsWithAffines(pixels, to_device_async(affines.to(torch.float32), images.device))


def evaluation_images(images: Tensor | MixedSizeImageList) -> Tensor:
    """The images for evaluation, fp32 (B, C, H, W) in [0, 1]; centre squares of uneven ones."""
    if isinstance(images, MixedSizeImageList):
        images = images.squares()
    if images.is_floating_point():
        return images.to(torch.float32)
    return images.to(torch.float32).mul_(1 / 255)


def _frame_affines(
    settings: ViewSettings,
    original: Sequence[int] | tuple[Tensor, Tensor],
    size: tuple[int, int],
    draws: BatchDraws,
) -> Tensor:
    """From the original to the (cropped) view of ``size``."""
    count = draws.images
    if settings.crop is None:
        return warping.scaling_affines(size[0] / original[0], size[1] / original[1], count)
    top, left, height, width = warping.draw_crop_windows(
        draws, original, settings.crop.scale, CROP_RATIO
    )
    enlarged = warping.scaling_affines(size[0] / height, size[1] / width, count)
    return enlarged @ warping.translation_affines(-top, -left, count)


def _affine(settings: AffineRanges, size: tuple[int, int], draws: BatchDraws) -> Tensor:
    count = draws.images
    factor = warping.uniform_draws(draws, *settings.scale)
    shear = warping.uniform_draws(draws, -settings.shear, settings.shear).deg2rad().tan()
    degrees = warping.uniform_draws(draws, -settings.degrees, settings.degrees)
    turn = warping.rotation_affines(degrees.deg2rad())
    down, right = (
        warping.uniform_draws(draws, -settings.translate, settings.translate) * side
        for side in size
    )
    linear = (
        turn
        @ warping.shearing_affines(0, shear, count)
        @ warping.scaling_affines(factor, factor, count)
    )
    return warping.recentre_affines(warping.translation_affines(down, right, count) @ linear, *size)


def _check_range(ends: tuple[float, float], most: float) -> tuple[float, float]:
    low, high = ends
    if not 0 < low <= high <= most:
        limit = f" ≤ {most:g}" if math.isfinite(most) else ""
        raise ValueError(f"found [{low}, {high}]; allowed: 0 < lowest ≤ highest{limit}")
    return ends

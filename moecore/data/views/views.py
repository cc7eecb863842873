"""Random views of a batch, made on its device, with their exact affines, and mixing of images.

B images, C channels, H×W pixels, as many in a view (volumes: views3d). Every random number comes
from the CPU generator that is passed in, so a view is a function of (seed, step) on every device.
Two images become one by Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Generator, Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.streams import BatchDraws
from moecore.core.surroundings import Misfits, Surroundings, format_changed_settings
from moecore.data.views import augmentations, warping
from moecore.data.views.views3d import FLAT_VIEWS, make_random_volume_views
from moecore.tasks.base import Task

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


def falsifies_truth(around: Surroundings) -> str:
    """Return why pixels must not change where a channel of the images says the truth."""
    return f"which would falsify the truth of {around.data}; allowed: leave it out"


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
    randaugment: augmentations.RandAugment | None = Field(
        None, description="RandAugment: number of operations and magnitude"
    )
    jitter: augmentations.ColourJitter | None = Field(
        None, description="Random brightness, contrast and saturation"
    )
    erasing: float = Field(
        0.0, ge=0, le=1, description="Probability of a black rectangle of 2 to 33 % of the view"
    )
    fill: Literal["zeros", "border", "reflection"] = Field(
        "zeros", description="Outside the image: black, the nearest pixel, the mirror image"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield changes that are none, whatever the images, or that volumes or grey images lack."""
        for key in ("affine", "randaugment", "jitter"):
            change = getattr(self, key)
            if change is not None and change.is_identity:
                others = ", ".join(name for name in type(change).model_fields if name != "names")
                yield (key,), f"found one that changes nothing; allowed: null, or other {others}"
        if self.fill != "zeros" and not self.leaves_image:
            text = f"found {self.fill}, but no view reaches beyond its image"
            yield ("fill",), f"{text}; allowed: zeros, or a shift, a crop or an affine"
        if around.source is not None and around.source.volumes:
            for name in FLAT_VIEWS:
                if value := getattr(self, name):
                    text = f"found {format_changed_settings(value)}, which is for flat images"
                    allowed = "allowed for volumes: shift, flip, affine and fill"
                    yield (name,), f"{text}; {allowed}"
            if self.affine is not None and self.affine.shear:
                text = f"found {self.affine.shear:g}, which is for flat images"
                yield ("affine", "shear"), f"{text}; allowed for volumes: 0"
        elif around.preview is not None and around.preview.channels == 1:
            why = f"but {around.data} has grey images, whose saturation nothing changes"
            if self.jitter is not None and self.jitter.saturation:
                text = f"found {self.jitter.saturation:g}, {why}; allowed: 0"
                yield ("jitter", "saturation"), text
            if self.randaugment is not None and set(self.randaugment.names) == {"saturation"}:
                yield ("randaugment", "names"), f"found saturation, {why}; allowed: others"

    def pixel_misfits(self, around: Surroundings) -> Misfits:
        """Yield changes of pixels where a channel of theirs says the truth."""
        for key in ("randaugment", "jitter", "erasing"):
            if around.has_truth and getattr(self, key):
                yield ("views", key), f"found a change of pixels, {falsifies_truth(around)}"

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
    images: Tensor | warping.MixedSizeImageList,
    settings: ViewSettings,
    source: Generator | BatchDraws,
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
    if isinstance(images, warping.MixedSizeImageList) and settings.crop is None:
        raise UserError(f"views: found crop: null, but {UNEVEN_REFUSAL}")
    original, size = warping.image_and_view_sizes(images)
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
    if isinstance(images, warping.MixedSizeImageList):
        pixels = warping.warp_uneven_images(images, affines, size, settings.fill)
    elif settings.on_grid:
        pixels = warping.shift_and_flip(images, shifts, mirrored, settings.fill).to(torch.float32)
    else:
        pixels = warping.warp_images(images, affines, size, settings.fill)
    if drawn:
        pixels = augmentations.apply_colour_operations(pixels, drawn)
    if settings.jitter:
        pixels = augmentations.jitter_colours(
            pixels, augmentations.draw_jitter(settings.jitter, draws)
        )
    pixels = pixels.mul_(1 / 255).clamp_(0, 1)  # interpolation may exceed 1 by rounding
    if settings.erasing:
        pixels = augmentations.erase_rectangles(pixels, settings.erasing, draws)
    return ViewsWithAffines(
        pixels, warping.to_device_async(affines.to(torch.float32), images.device)
    )


def evaluation_images(images: Tensor | warping.MixedSizeImageList) -> Tensor:
    """The images for evaluation, fp32 (B, C, H, W) in [0, 1]; centre squares of uneven ones."""
    if isinstance(images, warping.MixedSizeImageList):
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


class Mix(Config):
    """Which images are mixed and how strongly.

    Where both alphas are above 0, each image gets one of the two by a fair coin.
    """

    mixup: float = Field(0.0, ge=0, description="alpha of mixup's Beta(alpha, alpha); 0 = off")
    cutmix: float = Field(0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0 = off")
    probability: float = Field(
        1.0, ge=0, le=1, description="Probability that an image is mixed at all"
    )

    @property
    def active(self) -> bool:
        """True where anything is ever mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield settings by which nothing is mixed, and images whose truth mixing would falsify."""
        if not self.active:
            text = "found one that mixes nothing"
            yield (), f"{text}; allowed: null, or mixup or cutmix above 0"
        if around.has_truth:
            yield (), f"found a change of pixels, {falsifies_truth(around)}"


def mix_images(
    images: Tensor,
    labels: Tensor,
    task: Task,
    settings: Mix,
    source: Generator | BatchDraws,
    others: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix each image with a random partner of the batch: images (B, C, H, W), soft labels (B, K).

    images: fp32 (B, C, H, W) in [0, 1], as the mixed ones; labels: int64 (B,), the mixed ones fp32.
    task: of the labels. source: a generator on the CPU, or the draws of these images. others: the
    images and labels at places (B,) of the whole batch, where these images are a part of it. λ is
    drawn per image; CutMix's λ is the exact share of pixels kept. Raises UserError for a task whose
    labels are not one class each.
    """
    if why := task.needs_classes("mix"):
        raise UserError(f"mix: found mixup or cutmix, but {why}; allowed: mix: null")
    hard = F.one_hot(labels, task.outputs).to(torch.float32)
    if not settings.active:
        return images, hard
    draws = BatchDraws.of(source, len(images))
    height, width = images.shape[-2:]
    partner = draws.select_rows(torch.randperm(draws.whole, generator=draws.generator))
    shares, cut = _draw_shares(settings, draws)
    rows, columns = _boxes(shares, cut, height, width, draws)
    area = (rows.sum(1) * columns.sum(1)).to(torch.float64) / (height * width)
    shares = torch.where(cut, 1 - area, shares).to(torch.float32)
    # Boxes go to the device as their rows and columns: whole masks would be half of a step's bytes.
    hidden = (
        warping.to_device_async(rows, images.device)[:, :, None]
        & warping.to_device_async(columns, images.device)[:, None, :]
    )
    cut, shares = (
        warping.to_device_async(cut, images.device)[:, None],
        warping.to_device_async(shares, images.device)[:, None],
    )
    kept = 1 - hidden.to(torch.float32)
    weights = torch.where(cut[:, None], kept, shares[:, None])[:, None]
    if others is None:
        where = warping.to_device_async(partner, images.device)
        return torch.lerp(images[where], images, weights), torch.lerp(hard[where], hard, shares)
    other, labelled = others(partner)
    known = F.one_hot(labelled, task.outputs).to(torch.float32)
    return torch.lerp(other, images, weights), torch.lerp(known, hard, shares)


def _draw_shares(settings: Mix, draws: BatchDraws) -> tuple[Tensor, Tensor]:
    """λ (B,) fp64, 1 where an image is left alone, and whether it is cut (B,)."""
    # torch draws no Beta from a generator, numpy does.
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=draws.generator)))
    coin = np.full(draws.whole, settings.cutmix > 0)
    if settings.mixup and settings.cutmix:
        coin = random.random(draws.whole) < 0.5
    alphas = np.where(coin, settings.cutmix, settings.mixup)
    mixed = random.random(draws.whole) < settings.probability
    shares = np.where(mixed, random.beta(alphas, alphas), 1.0)
    return draws.select_rows(torch.from_numpy(shares)), draws.select_rows(torch.from_numpy(coin))


def _boxes(
    shares: Tensor, cut: Tensor, height: int, width: int, draws: BatchDraws
) -> tuple[Tensor, Tensor]:
    """Rows (B, H) and columns (B, W) of a box of area 1 − λ around a random centre.

    Cut at the border, whole pixels.
    """
    drawn = torch.rand(2, draws.whole, generator=draws.generator, dtype=torch.float64)
    centre = [draws.select_rows(values) for values in drawn]
    half = (1 - shares).sqrt() / 2 * cut
    return _is_within_box(height, centre[0], half), _is_within_box(width, centre[1], half)


def _is_within_box(side: int, centre: Tensor, half: Tensor) -> Tensor:
    low = ((centre - half) * side).round()
    high = ((centre + half) * side).round()
    places = torch.arange(side)
    return (places >= low[:, None]) & (places < high[:, None])

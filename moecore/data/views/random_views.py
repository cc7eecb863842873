"""Make random views of a batch, with their exact affines; mix images (mixup, CutMix).

B images, C channels, H×W pixels, also of the views (volumes: views3d). All random numbers come from
the given CPU generator, so a view is a function of (seed, step) on every device. Mixup (Zhang et
al. 2018) and CutMix (Yun et al. 2019) combine two images.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Generator, Tensor

from moecore.core.config import Config, Misfits, Surroundings, format_nondefaults
from moecore.core.files import UserError, format_found_and_allowed
from moecore.core.streams import BatchDraws
from moecore.data.views import augmentations, warping
from moecore.data.views.warping import FLAT_IMAGE_SETTINGS, make_random_volume_views_and_affines
from moecore.tasks.base import Task

CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a crop: lowest, highest
CROP_NEEDED = "the images are kept whole (short_side); allowed: a crop, as {scale: [0.08, 1.0]}"


def _check_range(ends: tuple[float, float], limit: float = math.inf) -> tuple[float, float]:
    low, high = ends
    if not 0 < low <= high <= limit:
        allowed = "0 < lowest ≤ highest" + (f" ≤ {limit:g}" if math.isfinite(limit) else "")
        raise ValueError(format_found_and_allowed(found=f"[{low}, {high}]", allowed=allowed))
    return ends


class CropRanges(Config):
    """Settings of a random crop, which is resized to the view."""

    scale: Annotated[tuple[float, float], AfterValidator(partial(_check_range, limit=1.0))] = Field(
        (0.5, 1.0), description="Area of the crop, as a share of the image: lowest, highest"
    )


class AffineRanges(Config):
    """Limits of a random affine about the centre: scale and shear, rotation, translation."""

    degrees: float = Field(0.0, ge=0, le=180, description="Largest rotation; of volumes: per axis")
    translate: float = Field(0.0, ge=0, le=1, description="Largest shift per axis, share of a side")
    scale: Annotated[tuple[float, float], AfterValidator(_check_range)] = Field(
        (1.0, 1.0), description="Scaling factor of all sides: lowest, highest"
    )
    shear: float = Field(0.0, ge=0, lt=45, description="± degrees along the columns; images only")

    @property
    def is_identity(self) -> bool:
        return not (self.degrees or self.translate or self.shear) and self.scale == (1, 1)


def format_truth_refusal(around: Surroundings) -> str:
    return f"which would falsify the truth of {around.data}; allowed: leave it out"


class ViewSettings(Config):
    """Settings of random views: shift, crop, flip, affine, RandAugment, colours, erasing.

    They are applied in this order (colours: RandAugment's, then jitter); the default changes
    nothing. All geometry is one affine and one linear sampling; shifts and flips alone keep every
    pixel exact. Volumes take shift, flip (of their first axis, which runs from left to right),
    affine without shear, and fill.
    """

    shift: int = Field(0, ge=0, description="Largest movement per axis in pixels (pad and crop)")
    crop: CropRanges | None = Field(None, description="Random resized crop")
    flip: bool = Field(False, description="Mirror left and right with probability one half")
    affine: AffineRanges | None = Field(None, description="Random affine")
    randaugment: augmentations.RandAugment | None = Field(
        None, description="RandAugment: number of operations, magnitude; null: off"
    )
    jitter: augmentations.ColourJitter | None = Field(
        None, description="Random brightness, contrast and saturation"
    )
    erasing: float = Field(0.0, ge=0, le=1, description="Probability; black 2 to 33 % of the view")
    fill: Literal["zeros", "border", "reflection"] = Field(
        "zeros", description="Outside the image: black, the nearest pixel, the mirrored image"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        for key in ("affine", "randaugment", "jitter"):
            change = getattr(self, key)
            if change is not None and change.is_identity:
                fields = ", ".join(name for name in type(change).model_fields if name != "names")
                yield (key,), f"found one that changes nothing; allowed: null, or other {fields}"
        if self.fill != "zeros" and not self.reaches_outside_image:
            why = f"found {self.fill}, but no view reaches beyond its image"
            yield ("fill",), f"{why}; allowed: zeros, or a shift, a crop or an affine"
        if around.source is not None and around.source.volumes:
            for name in FLAT_IMAGE_SETTINGS:
                if value := getattr(self, name):
                    yield (
                        (name,),
                        f"found {format_nondefaults(value)}, which is for flat images; "
                        "allowed for volumes: shift, flip, affine and fill",
                    )
            if self.affine is not None and (shear := self.affine.shear):
                why = f"found {shear:g}, which is for flat images; allowed for volumes: 0"
                yield ("affine", "shear"), why
        elif around.preview is not None and around.preview.channels == 1:
            why = f"but {around.data} has grey images, whose saturation nothing changes"
            if self.jitter is not None and (saturation := self.jitter.saturation):
                yield ("jitter", "saturation"), f"found {saturation:g}, {why}; allowed: 0"
            if self.randaugment is not None and set(self.randaugment.names) == {"saturation"}:
                yield ("randaugment", "names"), f"found saturation, {why}; allowed: others"

    def pixel_misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, message) per setting that edits pixels if a channel has tokens' groups."""
        for key in ("randaugment", "jitter", "erasing"):
            if around.has_truth and getattr(self, key):
                yield ("views", key), f"found a change of pixels, {format_truth_refusal(around)}"

    @property
    def reaches_outside_image(self) -> bool:
        """True if a view can show, or interpolate with, pixels outside its image."""
        moves = self.randaugment is not None and self.randaugment.moves
        return bool(self.shift or self.crop or self.affine or moves)

    @property
    def needs_no_interpolation(self) -> bool:
        """True if views are only flips and shifts by whole pixels, without interpolation."""
        return not (self.crop or self.affine or (self.randaugment and self.randaugment.moves))


class ViewsWithAffines(NamedTuple):
    images: Tensor  # fp32 (B, C, *pixels) in [0, 1]
    affines: Tensor  # from image to view, (B, 3, 3), or of volumes (B, 4, 4)


def make_random_views(
    images: Tensor | warping.MixedSizeImageList,
    settings: ViewSettings,
    source: Generator | BatchDraws,
) -> ViewsWithAffines:
    """Make one random view of each image; also return the affines from image to view."""
    # images: uint8 (B, C, H, W); volumes (B, C, D, H, W) in [0, 1]; or images of different shapes,
    # which need a crop.
    draws = BatchDraws.of(source, len(images))
    if isinstance(images, Tensor) and images.ndim == 5:
        return ViewsWithAffines(*make_random_volume_views_and_affines(images, settings, draws))
    original: Sequence[Any]
    if isinstance(images, warping.MixedSizeImageList):
        if settings.crop is None:
            raise UserError(f"views: found crop: null, but {CROP_NEEDED}")
        original, size = images.extents, (images.size, images.size)
    else:
        original = size = (images.shape[2], images.shape[3])
    shifts = draws.integers(-settings.shift, settings.shift + 1, 2)
    frame = _crop_or_scale_affines(settings, original, size, draws)
    # Drawn even if unused, so that a setting changes no other draw.
    mirrored = draws.rand() < (0.5 if settings.flip else 0.0)
    moved = warping.translation_affines(shifts[:, 0], shifts[:, 1], len(images))
    affines = warping.flip_affines(mirrored, size[1]) @ frame @ moved
    if settings.affine:
        affines = _draw_ranged_affines(settings.affine, size, draws) @ affines
    operations = None
    if settings.randaugment:
        operations = augmentations.draw_operations(settings.randaugment, draws)
        if settings.randaugment.moves:
            affines = augmentations.operation_affines(operations, *size) @ affines
    if isinstance(images, warping.MixedSizeImageList):
        # Only the visible parts of images of different shapes are sent to the device.
        parts, of_parts = warping.cut_parts_seen_by_views(images, affines, size, settings.fill)
        parts = warping.to_device_async(parts, images.device).permute(0, 3, 1, 2).contiguous()
        pixels = warping.warp_images(parts, of_parts, size, "zeros")
    elif settings.needs_no_interpolation:
        pixels = warping.shift_and_flip(images, shifts, mirrored, settings.fill).to(torch.float32)
    else:
        pixels = warping.warp_images(images, affines, size, settings.fill)
    if operations:
        pixels = augmentations.apply_colour_operations_in_place(pixels, operations)
    if settings.jitter:
        jitter = augmentations.draw_jitter(settings.jitter, draws)
        pixels = augmentations.jitter_colours_in_place(pixels, jitter)
    pixels = pixels.mul_(1 / 255).clamp_(0, 1)  # interpolation may exceed 1 by rounding
    if settings.erasing:
        pixels = augmentations.erase_rectangles_in_place(pixels, settings.erasing, draws)
    affines = warping.to_device_async(affines.to(torch.float32), images.device)
    return ViewsWithAffines(pixels, affines)


def prepare_evaluation_images(images: Tensor | warping.MixedSizeImageList) -> Tensor:
    """Return images for evaluation, fp32 (B, C, H, W) in [0, 1], cut to squares if uncropped."""
    if isinstance(images, warping.MixedSizeImageList):
        images = images.squares()
    pixels = images.to(torch.float32)
    return pixels if images.is_floating_point() else pixels.mul_(1 / 255)


def _crop_or_scale_affines(
    settings: ViewSettings, original: Sequence[Any], size: tuple[int, int], draws: BatchDraws
) -> Tensor:
    """Return affines (B, 3, 3) that scale whole images, or random crops if set, to ``size``."""
    count = draws.image_count
    if settings.crop is None:
        return warping.scaling_affines(size[0] / original[0], size[1] / original[1], count)
    windows = warping.draw_crop_windows(draws, original, settings.crop.scale, CROP_RATIO)
    first_row, first_column, height, width = windows
    enlarged = warping.scaling_affines(size[0] / height, size[1] / width, count)
    return enlarged @ warping.translation_affines(-first_row, -first_column, count)


def _draw_ranged_affines(ranges: AffineRanges, size: tuple[int, int], draws: BatchDraws) -> Tensor:
    count = draws.image_count
    factor = warping.uniform_draws(draws, *ranges.scale)
    shear = warping.uniform_draws(draws, -ranges.shear, ranges.shear).deg2rad().tan()
    degrees = warping.uniform_draws(draws, -ranges.degrees, ranges.degrees)
    turn = warping.rotation_affines(degrees.deg2rad())
    limit = ranges.translate
    down, right = (warping.uniform_draws(draws, -limit, limit) * side for side in size)
    sheared = turn @ warping.shearing_affines(0, shear, count)
    linear = sheared @ warping.scaling_affines(factor, factor, count)
    return warping.recentre_affines(warping.translation_affines(down, right, count) @ linear, *size)


class Mix(Config):
    """Mixup and CutMix; with both alphas above 0, a fair coin picks one of the two per image."""

    mixup: float = Field(0.0, ge=0, description="alpha of mixup's Beta(alpha, alpha); 0 = off")
    cutmix: float = Field(0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0 = off")
    probability: float = Field(1.0, ge=0, le=1, description="Probability that an image is mixed")

    @property
    def active(self) -> bool:
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def misfits(self, around: Surroundings) -> Misfits:
        if not self.active:
            yield (), "found one that mixes nothing; allowed: null, or mixup or cutmix above 0"
        if around.has_truth:
            yield (), f"found a change of pixels, {format_truth_refusal(around)}"


def mix_batch(
    images: Tensor,  # fp32 in [0, 1]
    labels: Tensor,
    task: Task,
    settings: Mix,
    source: Generator | BatchDraws,
    take_partners: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix with random images of the complete batch; return (B, C, H, W) and soft labels (B, K)."""
    # take_partners: returns images and labels at positions (B,) of the complete batch; None if
    # ``images`` are all of it. λ is per image; CutMix's is the exact share of unreplaced pixels.
    if why := task.needs_classes("mix"):
        raise UserError(f"mix: found mixup or cutmix, but {why}; allowed: mix: null")
    hard = F.one_hot(labels, task.outputs).to(torch.float32)
    if not settings.active:
        return images, hard
    draws = BatchDraws.of(source, len(images))
    height, width = images.shape[-2:]
    partner = draws.select_rows(torch.randperm(draws.batch_size, generator=draws.generator))
    shares, cut = _draw_mix_shares_and_kinds(settings, draws)
    # boxes of area 1 − λ around random centres: rows (B, H), columns (B, W)
    centres = torch.rand(2, draws.batch_size, generator=draws.generator, dtype=torch.float64)
    half = (1 - shares).sqrt() / 2 * cut
    box_rows = _is_within_box(height, draws.select_rows(centres[0]), half)
    box_columns = _is_within_box(width, draws.select_rows(centres[1]), half)
    area = (box_rows.sum(1) * box_columns.sum(1)).to(torch.float64) / (height * width)
    shares = torch.where(cut, 1 - area, shares).to(torch.float32)
    # Boxes go to the device as their rows and columns: whole masks would be half of a step's bytes.
    send = partial(warping.to_device_async, device=images.device)
    hidden = send(box_rows)[:, :, None] & send(box_columns)[:, None, :]
    cut = send(cut)[:, None]
    shares = send(shares)[:, None]
    weights = torch.where(cut[:, None], 1 - hidden.to(torch.float32), shares[:, None])[:, None]
    if take_partners is None:
        rows = send(partner)
        return torch.lerp(images[rows], images, weights), torch.lerp(hard[rows], hard, shares)
    draw_partners, partner_labels = take_partners(partner)
    partner_hard = F.one_hot(partner_labels, task.outputs).to(torch.float32)
    return torch.lerp(draw_partners, images, weights), torch.lerp(partner_hard, hard, shares)


def _draw_mix_shares_and_kinds(settings: Mix, draws: BatchDraws) -> tuple[Tensor, Tensor]:
    """Draw mixing shares λ (B,) fp64, 1 for unmixed images, and whether to use CutMix, (B,)."""
    # torch cannot draw Beta from a generator, numpy can.
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=draws.generator)))
    is_cutmix = np.full(draws.batch_size, settings.cutmix > 0)
    if settings.mixup and settings.cutmix:
        is_cutmix = random.random(draws.batch_size) < 0.5
    alphas = np.where(is_cutmix, settings.cutmix, settings.mixup)
    is_mixed = random.random(draws.batch_size) < settings.probability
    shares = torch.from_numpy(np.where(is_mixed, random.beta(alphas, alphas), 1.0))
    return draws.select_rows(shares), draws.select_rows(torch.from_numpy(is_cutmix))


def _is_within_box(side: int, centre: Tensor, half: Tensor) -> Tensor:
    # Boxes are whole pixels, clipped at the border.
    low = ((centre - half) * side).round()
    high = ((centre + half) * side).round()
    positions = torch.arange(side)
    return (positions >= low[:, None]) & (positions < high[:, None])

"""Affine maps of images and volumes, and sampling of the views that they describe.

Affines (B, 3, 3) of a batch are drawn on the CPU in fp64. An affine maps a point (row, column, 1)
of the original image to the view; pixel centres are at +0.5. Later maps multiply from the left.
Of volumes they are (B, 4, 4) and map (x, y, z, 1); in canonical (RAS) volumes the first axis runs
from left to right. A view of a volume is one trilinear sampling; shifts and flips keep every voxel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import BatchDraws


def uniform_draws(draws: BatchDraws, low: float, high: float) -> Tensor:
    return low + (high - low) * draws.rand(dtype=torch.float64)


def affines_from_matrix_rows(rows: tuple, columns: tuple, count: int) -> Tensor:
    """Build affines (count, 3, 3) with the matrix rows ``rows``, ``columns`` and 0 0 1."""
    affines = torch.zeros(count, 3, 3, dtype=torch.float64)
    for row, entries in enumerate((rows, columns, (0, 0, 1))):
        for column, entry in enumerate(entries):
            affines[:, row, column] = entry
    return affines


def scaling_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """Return affines (count, 3, 3) that scale by these factors about the corner (0, 0)."""
    return affines_from_matrix_rows((rows, 0, 0), (0, columns, 0), count)


def translation_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """Return affines (count, 3, 3) that move ``rows`` pixels down and ``columns`` right."""
    return affines_from_matrix_rows((1, 0, rows), (0, 1, columns), count)


def rotation_affines(radians: Tensor) -> Tensor:
    """Return affines that rotate by ``radians`` (B,) counter-clockwise about the corner (0, 0)."""
    cosine, sine = radians.cos(), radians.sin()
    return affines_from_matrix_rows((cosine, -sine, 0), (sine, cosine, 0), len(radians))


def shearing_affines(rows: Tensor | float, columns: Tensor | float, count: int) -> Tensor:
    """Return affines that shear: row += rows · column; column += columns · row."""
    return affines_from_matrix_rows((1, rows, 0), (columns, 1, 0), count)


def flip_affines(mirrored: Tensor, width: float) -> Tensor:
    """Return affines (B, 3, 3) that mirror images of ``width`` pixels where ``mirrored`` (B,)."""
    is_mirrored = mirrored.to(torch.float64)
    columns = (0, 1.0 - 2.0 * is_mirrored, width * is_mirrored)
    return affines_from_matrix_rows((1, 0, 0), columns, len(mirrored))


def recentre_affines(affines: Tensor, height: float, width: float) -> Tensor:
    """Return affines (B, 3, 3) that do at the image's middle what ``affines`` do at its corner."""
    to_middle = translation_affines(-height / 2, -width / 2, len(affines))
    return translation_affines(height / 2, width / 2, len(affines)) @ affines @ to_middle


def draw_crop_windows(
    draws: BatchDraws, size: Sequence[Any], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw windows in images of ``size`` (H, W): first row and column, height, width, (B,) each."""
    # Area is uniform in ``scale`` (share of the image), width / height log-uniform in ``ratio``; a
    # side longer than the image's is cut to it (our choice: Inception draws again up to ten times).
    area = uniform_draws(draws, *scale) * (size[0] * size[1])
    aspect = uniform_draws(draws, math.log(ratio[0]), math.log(ratio[1])).exp()
    height = (area / aspect).sqrt().clamp(max=size[0])
    width = (area * aspect).sqrt().clamp(max=size[1])
    first_row = (size[0] - height) * uniform_draws(draws, 0, 1)
    first_column = (size[1] - width) * uniform_draws(draws, 0, 1)
    return first_row, first_column, height, width


def invert_affines(affines: Tensor) -> Tensor:
    (a, b, t), (c, d, u) = (line.unbind(-1) for line in affines[:, :2].unbind(1))
    scale = 1 / (a * d - b * c)
    return affines_from_matrix_rows(
        (d * scale, -b * scale, (b * u - d * t) * scale),
        (-c * scale, a * scale, (c * t - a * u) * scale),
        len(affines),
    )


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def warp_images(images: Tensor, affines: Tensor, size: tuple[int, int], fill: str) -> Tensor:
    """Map uint8 images by affines, bilinearly, to fp32 (B, C, *size) in 0..255; fill: padding."""
    # affines: image to view. Outside the image: 0 (zeros), the nearest pixel (border) or the
    # mirrored image (reflection). Strong shrinking is not smoothed.
    height, width = images.shape[-2:]
    # view (column, row, 1) → original (column, row)
    back = invert_affines(affines)[:, :2].flip(1)[:, :, [1, 0, 2]]
    middle_row, middle_column = size[0] / 2, size[1] / 2
    half_view = [[middle_column, 0, middle_column], [0, middle_row, middle_row], [0, 0, 1]]
    half = torch.tensor([width / 2, height / 2], dtype=torch.float64)
    theta = (back @ torch.tensor(half_view, dtype=torch.float64)) / half[:, None]
    theta[:, :, 2] -= 1
    theta = to_device_async(theta.to(torch.float32), images.device)
    grid = F.affine_grid(theta, [len(images), 1, *size], align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode=fill, align_corners=False)


@dataclass(frozen=True)
class MixedSizeImageList:
    """Images of different shapes, uint8 (H, W, C) each, still on the CPU."""

    images: list[np.ndarray]
    size: int  # height and width of a view, by default
    device: torch.device  # of the views

    def __len__(self) -> int:
        return len(self.images)

    @property
    def extents(self) -> tuple[Tensor, Tensor]:
        """Heights and widths, fp64 (B,) each."""
        sizes = torch.tensor([image.shape[:2] for image in self.images], dtype=torch.float64)
        return sizes[:, 0], sizes[:, 1]

    def squares(self) -> Tensor:
        """Return the largest centre squares, resized to uint8 (B, C, size, size), on the device."""
        from PIL import Image

        from moecore.data.files.decode import resize_centre_square  # loads PIL

        pictures = [Image.fromarray(image.squeeze()) for image in self.images]
        squares = [resize_centre_square(picture, self.size) for picture in pictures]
        return to_device_async(torch.from_numpy(np.stack(squares)), self.device).permute(0, 3, 1, 2)


def cut_parts_seen_by_views(
    images: MixedSizeImageList, affines: Tensor, size: tuple[int, int], fill: str
) -> tuple[Tensor, Tensor]:
    """Return each view's padded part of the image, uint8 (B, H, W, C), and affines part → view."""
    # The affine maps the part to the view; ``fill`` pads the part outside of the image.
    corners = torch.tensor([[0, 0, size[0], size[0]], [0, size[1], 0, size[1]], [1, 1, 1, 1]])
    reached = (invert_affines(affines) @ corners.to(torch.float64))[:, :2]
    low = reached.amin(-1).floor().to(torch.int64) - 1  # one more pixel, for the interpolation
    high = reached.amax(-1).ceil().to(torch.int64) + 1
    height, width = (high - low).amax(0).tolist()
    channels = images.images[0].shape[-1]
    pinned = images.device.type == "cuda"
    parts = torch.zeros(len(images), height, width, channels, dtype=torch.uint8, pin_memory=pinned)
    limits = (low.tolist(), high.tolist())
    for image, part, first, last in zip(images.images, parts.numpy(), *limits, strict=True):
        _copy_part(image, part, first, last, fill)
    return parts, affines @ translation_affines(low[:, 0], low[:, 1], len(images))


def _copy_part(
    image: np.ndarray, part: np.ndarray, first: list[int], last: list[int], fill: str
) -> None:
    """Copy an image's (H, W, C) window from ``first`` to ``last``, (row, column), to ``part``."""
    if fill == "zeros":
        begin = np.clip(first, 0, image.shape[:2])
        end = np.clip(last, 0, image.shape[:2])
        inside = [slice(a - f, b - f) for a, b, f in zip(begin, end, first, strict=True)]
        part[inside[0], inside[1]] = image[begin[0] : end[0], begin[1] : end[1]]
        return
    rows, columns = (
        clamp_or_reflect_indices(torch.arange(a, b), length, fill).numpy()
        for a, b, length in zip(first, last, image.shape[:2], strict=True)
    )
    part[: len(rows), : len(columns)] = image[rows][:, columns]


def shift_and_flip(images: Tensor, shifts: Tensor, mirrored: Tensor, fill: str) -> Tensor:
    """Move images by ``shifts`` pixels (B, 2), then mirror them where ``mirrored`` (B,)."""
    count, _, height, width = images.shape
    rows = torch.arange(height) - shifts[:, :1]
    forward = torch.arange(width)
    columns = torch.where(mirrored[:, None], forward.flip(0), forward) - shifts[:, 1:]
    # Sending rows and columns instead of all their products takes a hundredth of the bytes.
    source_rows = to_device_async(clamp_or_reflect_indices(rows, height, fill), images.device)
    source_columns = to_device_async(clamp_or_reflect_indices(columns, width, fill), images.device)
    flat = source_rows[:, :, None] * width + source_columns[:, None, :]
    index = flat.view(count, 1, -1).expand(-1, images.shape[1], -1)
    views = images.flatten(2).gather(2, index).view_as(images)
    if fill != "zeros" or not shifts.any():
        return views
    rows_inside = to_device_async(in_range_mask(rows, height), images.device)
    columns_inside = to_device_async(in_range_mask(columns, width), images.device)
    return views * (rows_inside[:, :, None] & columns_inside[:, None, :])[:, None]


def in_range_mask(index: Tensor, length: int) -> Tensor:
    return (index >= 0) & (index < length)


def clamp_or_reflect_indices(index: Tensor, length: int, fill: str) -> Tensor:
    if fill != "reflection":
        return index.clamp(0, length - 1)
    folded = index.remainder(2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)


FLAT_IMAGE_SETTINGS = ("crop", "randaugment", "jitter", "erasing")  # not for volumes


def make_random_volume_views_and_affines(
    volumes: Tensor, settings: Any, draws: BatchDraws
) -> tuple[Tensor, Tensor]:
    """Make one random view of each volume, fp32; also return its affine fp32 (B, 4, 4)."""
    names = [name for name in FLAT_IMAGE_SETTINGS if getattr(settings, name)]
    if settings.affine and settings.affine.shear:
        names.append("affine.shear")
    if names:
        raise UserError(
            f"views: found {', '.join(names)}, which are for images; allowed for volumes: shift, "
            "flip, affine (without shear), fill"
        )
    size = list(volumes.shape[2:])
    shifts = draws.integers(-settings.shift, settings.shift + 1, 3)
    mirrored = draws.rand() < (0.5 if settings.flip else 0.0)
    affines = volume_flip_affines(mirrored, size[0]) @ volume_translations(shifts)
    if settings.affine:
        affines = _draw_volume_affines(settings.affine, size, draws) @ affines
        views = warp_volumes(volumes, affines, settings.fill)
    else:
        views = _shift_and_flip_volumes(volumes, shifts, mirrored, settings.fill)
    return views.clamp_(0, 1), to_device_async(affines.to(torch.float32), volumes.device)


def warp_volumes(volumes: Tensor, affines: Tensor, fill: str) -> Tensor:
    """Sample volumes trilinearly by CPU affines (volume to view); return fp32 (B, C, D, H, W)."""
    half = torch.tensor(volumes.shape[2:], dtype=torch.float64) / 2
    unit = torch.diag(torch.cat([half, half.new_ones(1)]))  # from −1 … 1 about the middle to voxels
    unit[:3, 3] = half
    # view to original, both −1 … 1; grid_sample names the last axis first
    theta = (torch.linalg.inv(unit) @ torch.linalg.inv(affines) @ unit)[:, [2, 1, 0]]
    theta = to_device_async(theta.to(torch.float32), volumes.device)
    # theta of the voxel centres, (B, D, H, W, 3); takes a third of the time of torch's affine_grid
    grid = theta[:, None, None, None, :, 3]
    for axis, length in enumerate(volumes.shape[2:]):
        places = torch.arange(length, device=theta.device, dtype=theta.dtype)
        centres = ((2 * places + 1) / length - 1).view(-1, *[1] * (3 - axis))
        grid = grid + theta[:, None, None, None, :, axis] * centres
    return F.grid_sample(volumes.float(), grid, padding_mode=fill, align_corners=False)


def _draw_volume_affines(settings: Any, size: list[int], draws: BatchDraws) -> Tensor:
    """Return random affines (B, 4, 4) that scale, rotate about three central axes, and move."""
    scaled = volume_identities(draws.image_count)
    scaled[:, :3] *= uniform_draws(draws, *settings.scale)[:, None, None]
    degrees, share = settings.degrees, settings.translate
    turns = [uniform_draws(draws, -degrees, degrees).deg2rad() for _ in size]
    moves = [uniform_draws(draws, -share, share) * side for side in size]
    turned = volume_rotations(torch.stack(turns, dim=1)) @ scaled
    return centred_volume_affines(volume_translations(torch.stack(moves, dim=1)) @ turned, size)


def _shift_and_flip_volumes(volumes: Tensor, shifts: Tensor, mirrored: Tensor, fill: str) -> Tensor:
    """Move volumes by ``shifts`` voxels (B, 3), then mirror them where ``mirrored`` (B,)."""
    count, channels, *size = volumes.shape
    depth, height, width = size
    send = partial(to_device_async, device=volumes.device)
    pairs = zip(size, shifts.T, strict=True)
    indices = [torch.arange(length) - move[:, None] for length, move in pairs]
    turned = torch.arange(depth).flip(0) - shifts[:, :1]
    indices[0] = torch.where(mirrored[:, None], turned, indices[0])
    first, second, third = (
        send(clamp_or_reflect_indices(index, length, fill))
        for index, length in zip(indices, size, strict=True)
    )
    # Whole lines of the last axis are copied; the lines' numbers are made on the device.
    pages = torch.arange(count * channels, device=volumes.device).view(count, channels, 1)
    lines = (pages * depth + first[:, None])[..., None] * height + second[:, None, None]
    views = volumes.reshape(-1, width).index_select(0, lines.flatten()).view(volumes.shape)
    if shifts[:, 2].any():
        views = views.gather(4, third[:, None, None, None].expand(views.shape))
    if fill == "zeros" and shifts.any():
        for axis, (index, length) in enumerate(zip(indices, size, strict=True)):
            inside = send(in_range_mask(index, length))
            views.mul_(inside.view(count, *[1] * (axis + 1), length, *[1] * (2 - axis)))
    return views.to(torch.float32)


def volume_identities(count: int) -> Tensor:
    return torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)


def volume_translations(moves: Tensor) -> Tensor:
    affines = volume_identities(len(moves))
    affines[:, :3, 3] = moves.to(torch.float64)
    return affines


def volume_rotations(radians: Tensor) -> Tensor:
    """Return affines that rotate by ``radians`` (B, 3) about the first, second, then third axis."""
    affines = volume_identities(len(radians))
    for axis in range(3):
        angle = radians[:, axis].to(torch.float64)
        first = (axis + 1) % 3
        second = (axis + 2) % 3
        turn = volume_identities(len(radians))
        turn[:, first, first] = turn[:, second, second] = angle.cos()
        turn[:, second, first] = angle.sin()
        turn[:, first, second] = -turn[:, second, first]
        affines = turn @ affines
    return affines


def volume_flip_affines(mirrored: Tensor, length: float) -> Tensor:
    """Return affines that mirror the first axis (``length`` voxels) where ``mirrored`` (B,)."""
    affines = volume_identities(len(mirrored))
    affines[:, 0, 0] = 1 - 2 * mirrored.to(torch.float64)
    affines[:, 0, 3] = length * mirrored.to(torch.float64)
    return affines


def centred_volume_affines(affines: Tensor, size: Sequence[float]) -> Tensor:
    """Return affines (B, 4, 4) that do at the volume's middle what ``affines`` do at its corner."""
    half = torch.tensor(size, dtype=torch.float64).div(2).expand(len(affines), 3)
    return volume_translations(half) @ affines @ volume_translations(-half)

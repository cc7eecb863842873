"""Random views of a batch of volumes, made on its device, with their exact affines.

B volumes, C channels, D × H × W voxels. All random numbers come from the given CPU generator. All
geometry is one trilinear sampling; shifts and flips alone keep every voxel exact.

Affines (B, 4, 4), drawn on the CPU in fp64, map a point (x, y, z, 1) of the original volume to the
view, in voxels along the first, second and third axis; voxel centres are at +0.5. In canonical
(RAS) volumes the first axis runs from left to right. Later maps multiply from the left.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import BatchDraws
from moecore.data.views import warping

FLAT_VIEWS = ("crop", "randaugment", "jitter", "erasing")  # not for volumes


def make_random_volume_views_and_affines(
    volumes: Tensor, settings: Any, draws: BatchDraws
) -> tuple[Tensor, Tensor]:
    """Return one random view of each volume, fp32, and its affine fp32 (B, 4, 4)."""
    names = [name for name in FLAT_VIEWS if getattr(settings, name)]
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
        affines = _affine(settings.affine, size, draws) @ affines
        views = warp_volumes(volumes, affines, settings.fill)
    else:
        views = _shift_and_flip(volumes, shifts, mirrored, settings.fill)
    return views.clamp_(0, 1), warping.to_device_async(affines.to(torch.float32), volumes.device)


def warp_volumes(volumes: Tensor, affines: Tensor, fill: str) -> Tensor:
    """Return views fp32 (B, C, D, H, W), trilinear; affines: volume to view, fp64, on the CPU."""
    half = torch.tensor(volumes.shape[2:], dtype=torch.float64) / 2
    unit = torch.diag(torch.cat([half, half.new_ones(1)]))  # from −1 … 1 about the middle to voxels
    unit[:3, 3] = half
    # view to original, both −1 … 1; grid_sample names the last axis first
    theta = (torch.linalg.inv(unit) @ torch.linalg.inv(affines) @ unit)[:, [2, 1, 0]]
    theta = warping.to_device_async(theta.to(torch.float32), volumes.device)
    # theta of the voxel centres, (B, D, H, W, 3); takes a third of the time of torch's affine_grid
    grid = theta[:, None, None, None, :, 3]
    for axis, length in enumerate(volumes.shape[2:]):
        places = torch.arange(length, device=theta.device, dtype=theta.dtype)
        centres = ((2 * places + 1) / length - 1).view(-1, *[1] * (3 - axis))
        grid = grid + theta[:, None, None, None, :, axis] * centres
    return F.grid_sample(
        volumes.to(torch.float32), grid, mode="bilinear", padding_mode=fill, align_corners=False
    )


def _affine(settings: Any, size: list[int], draws: BatchDraws) -> Tensor:
    """Return random affines (B, 4, 4) that scale, rotate about three central axes, and move."""
    scaled = volume_identities(draws.images)
    scaled[:, :3] *= warping.uniform_draws(draws, *settings.scale)[:, None, None]
    degrees, share = settings.degrees, settings.translate
    turns = [warping.uniform_draws(draws, -degrees, degrees).deg2rad() for _ in size]
    moves = [warping.uniform_draws(draws, -share, share) * side for side in size]
    turned = volume_rotations(torch.stack(turns, dim=1)) @ scaled
    return centred_volume_affines(volume_translations(torch.stack(moves, dim=1)) @ turned, size)


def _shift_and_flip(volumes: Tensor, shifts: Tensor, mirrored: Tensor, fill: str) -> Tensor:
    """Return volumes moved by ``shifts`` voxels (B, 3), then mirrored where ``mirrored`` (B,)."""
    count, channels, *size = volumes.shape
    depth, height, width = size
    send = partial(warping.to_device_async, device=volumes.device)
    pairs = zip(size, shifts.T, strict=True)
    indices = [torch.arange(length) - move[:, None] for length, move in pairs]
    turned = torch.arange(depth).flip(0) - shifts[:, :1]
    indices[0] = torch.where(mirrored[:, None], turned, indices[0])
    first, second, third = (
        send(warping.clamp_or_reflect_indices(index, length, fill))
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
            inside = send(warping.in_range_mask(index, length))
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
    """Return affines that mirror the first axis, ``length`` voxels, where ``mirrored`` (B,)."""
    affines = volume_identities(len(mirrored))
    affines[:, 0, 0] = 1 - 2 * mirrored.to(torch.float64)
    affines[:, 0, 3] = length * mirrored.to(torch.float64)
    return affines


def centred_volume_affines(affines: Tensor, size: Sequence[float]) -> Tensor:
    """Return the affines (B, 4, 4) about the middle of a volume of ``size``, not its corner."""
    half = torch.tensor(size, dtype=torch.float64).div(2).expand(len(affines), 3)
    return volume_translations(half) @ affines @ volume_translations(-half)

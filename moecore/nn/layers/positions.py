"""Position embeddings: for another resolution, and fixed ones."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

Interpolation = Literal["bilinear", "bicubic"]


def resize_positions(
    positions: Tensor,
    prefix: int,
    size: tuple[int, ...],
    mode: Interpolation = "bilinear",
    old: tuple[int, ...] | None = None,
) -> Tensor:
    """Interpolate (1, prefix + patches, width) position embeddings of the grid ``old``
    (None: a square one) to the grid ``size``.

    The first ``prefix`` embeddings (class and distillation token) are kept as they are. On three
    axes bilinear means trilinear.
    Raises ValueError where the patches do not form the grid, or for bicubic on three axes.
    Source: ViT (Dosovitskiy et al. 2021, §3.2); bicubic as in DeiT.
    """
    special = positions[:, :prefix]
    patches = positions[:, prefix:]
    if old is None:
        old = _square(patches.shape[1])
    old = tuple(old)
    if torch.Size(old).numel() != patches.shape[1] or len(old) != len(size):
        raise ValueError(
            f"{patches.shape[1]} position embeddings of the grid {list(old)} cannot be brought "
            f"to the grid {list(size)}"
        )
    if old == tuple(size):
        return positions
    if len(size) == 3 and mode != "bilinear":
        raise ValueError(f"interpolation: found {mode}; allowed for volumes: bilinear")
    grid = patches.reshape(1, *old, -1).movedim(-1, 1).float()
    if len(size) == 3:
        # torch smooths no volumes when it shrinks them
        grid = interpolate(grid, size=size, align_corners=False, mode="trilinear")
    else:
        grid = interpolate(grid, size=size, align_corners=False, mode=mode, antialias=True)
    return torch.cat([special, grid.flatten(2).transpose(1, 2).to(positions.dtype)], dim=1)


def waves(grid: tuple[int, ...], width: int) -> Tensor:
    """Fixed embeddings (1, patches, width) of a grid of patches, the last axis fastest: sines and
    cosines of the place along each axis.

    Each axis has an equal part of the width, first its sines, then its cosines, at wavelengths from
    2π to 2π·10⁴ patches.
    Raises ValueError unless twice the number of axes divides the width. Source: Vaswani et al.
    (2017), §3.5, one axis after another.
    """
    if width % (2 * len(grid)):
        raise ValueError(
            f"a width of {width} cannot hold a sine and a cosine along each of {len(grid)} axes"
        )
    number = width // (2 * len(grid))
    rates = torch.exp(-math.log(1e4) * torch.arange(number) / max(1, number - 1))
    along = [torch.arange(length) for length in grid]
    places = torch.stack(torch.meshgrid(*along, indexing="ij"), dim=-1).flatten(0, -2)
    angles = places[:, :, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1).unsqueeze(0)


def _square(patches: int) -> tuple[int, int]:
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(f"{patches} position embeddings do not form a square grid")
    return side, side

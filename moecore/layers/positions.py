"""Position embeddings for another resolution."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

Interpolation = Literal["bilinear", "bicubic"]


def resize_positions(positions: Tensor, prefix: int, size: tuple[int, int], mode: Interpolation = "bilinear") -> Tensor:
    """Interpolate (1, prefix + rows·columns, width) position embeddings of a square grid to the grid ``size``.

    The first ``prefix`` embeddings (class and distillation token) are kept as they are. Raises ValueError where the
    patches do not form a square. Source: ViT (Dosovitskiy et al. 2021, §3.2); bicubic as in DeiT.
    """
    special, patches = positions[:, :prefix], positions[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if side * side != patches.shape[1]:
        raise ValueError(f"{patches.shape[1]} position embeddings do not form a square grid")
    if (side, side) == tuple(size):
        return positions
    grid = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    grid = interpolate(grid, size=size, mode=mode, align_corners=False, antialias=True)
    return torch.cat([special, grid.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)

"""Affines (B, 4, 4) of a batch of volumes, drawn on the CPU in fp64.

An affine maps a point (x, y, z, 1) of the original volume to the view, in voxels along the first,
second and third axis; voxel centres are at +0.5, as pixel centres are. In canonical (RAS) volumes
the first axis runs from left to right. Later maps multiply from the left.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def identities(count: int) -> Tensor:
    """(count, 4, 4) fp64 that change nothing."""
    return torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)


def translation(moves: Tensor) -> Tensor:
    """Move by ``moves`` (B, 3) voxels."""
    found = identities(len(moves))
    found[:, :3, 3] = moves.to(torch.float64)
    return found


def scaling(factors: Tensor) -> Tensor:
    """Scale all axes by ``factors`` (B,) about the corner (0, 0, 0)."""
    return torch.diag_embed(
        torch.stack(
            [factors.to(torch.float64)] * 3 + [torch.ones(len(factors), dtype=torch.float64)], dim=1
        )
    )


def rotation(radians: Tensor) -> Tensor:
    """Turn by ``radians`` (B, 3) about the first axis, then the second, then the third; each
    carries the next axis towards the one after it.
    """
    found = identities(len(radians))
    for axis in range(3):
        found = _turn(radians[:, axis], (axis + 1) % 3, (axis + 2) % 3) @ found
    return found


def flip(mirrored: Tensor, length: float) -> Tensor:
    """Mirror the first axis (left and right), of ``length`` voxels, where ``mirrored`` (B,) is
    true.
    """
    found = identities(len(mirrored))
    found[:, 0, 0] = 1 - 2 * mirrored.to(torch.float64)
    found[:, 0, 3] = length * mirrored.to(torch.float64)
    return found


def about_centre(affines: Tensor, size: Sequence[float]) -> Tensor:
    """The same linear maps, with the middle of a volume of ``size`` as the fixed point;
    translations stay what they are.
    """
    half = torch.tensor(size, dtype=torch.float64).div(2).expand(len(affines), 3)
    return translation(half) @ affines @ translation(-half)


def _turn(radians: Tensor, first: int, second: int) -> Tensor:
    """Carry the axis ``first`` towards the axis ``second`` by ``radians`` (B,)."""
    found = identities(len(radians))
    found[:, first, first] = found[:, second, second] = radians.to(torch.float64).cos()
    found[:, second, first] = radians.to(torch.float64).sin()
    found[:, first, second] = -found[:, second, first]
    return found

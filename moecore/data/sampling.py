"""Making the pixels of a view from its affine: one gather where the map is on the pixel grid, else
one grid_sample.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.data.views.geometry import inverse


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy small CPU values to the device without making the host wait."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def warp(images: Tensor, affines: Tensor, size: tuple[int, int], fill: str) -> Tensor:
    """Bilinear views fp32 (B, C, h, w) in 0..255 of images uint8 (B, C, H, W); affines fp64
    (B, 3, 3) on the CPU.

    Outside the image: 0 (zeros), the nearest pixel (border) or the mirrored image (reflection).
    Strong shrinking is not smoothed.
    """
    height, width = images.shape[-2:]
    # view (column, row, 1) → original (column, row)
    back = inverse(affines)[:, :2].flip(1)[:, :, [1, 0, 2]]
    half_view = torch.tensor(
        [[size[1] / 2, 0, size[1] / 2], [0, size[0] / 2, size[0] / 2], [0, 0, 1]],
        dtype=torch.float64,
    )
    half = torch.tensor([width / 2, height / 2], dtype=torch.float64)
    theta = (back @ half_view) / half[:, None]
    theta[:, :, 2] -= 1
    grid = F.affine_grid(
        send(theta.to(torch.float32), images.device), [len(images), 1, *size], align_corners=False
    )
    return F.grid_sample(
        images.to(torch.float32), grid, mode="bilinear", padding_mode=fill, align_corners=False
    )


def shift_and_flip(images: Tensor, shifts: Tensor, mirrored: Tensor, fill: str) -> Tensor:
    """Views uint8 (B, C, H, W) moved by whole pixels, shifts (B, 2) int64 (down, right), then
    mirrored where (B,) says so.
    """
    count, _, height, width = images.shape
    rows = torch.arange(height) - shifts[:, :1]
    columns = (
        torch.where(mirrored[:, None], torch.arange(width).flip(0), torch.arange(width))
        - shifts[:, 1:]
    )
    # Rows and columns go to the device, not their products: a hundredth of the bytes.
    down = send(fold(rows, height, fill), images.device)
    right = send(fold(columns, width, fill), images.device)
    flat = down[:, :, None] * width + right[:, None, :]
    index = flat.view(count, 1, -1).expand(-1, images.shape[1], -1)
    views = images.flatten(2).gather(2, index).view_as(images)
    if fill != "zeros" or not shifts.any():
        return views
    tall = send(inside(rows, height), images.device)
    wide = send(inside(columns, width), images.device)
    return views * (tall[:, :, None] & wide[:, None, :])[:, None]


def inside(index: Tensor, length: int) -> Tensor:
    """Which indices are of 0 … length − 1."""
    return (index >= 0) & (index < length)


def fold(index: Tensor, length: int, fill: str) -> Tensor:
    """Bring indices back into 0..length−1 as grid_sample's padding modes do."""
    if fill != "reflection":
        return index.clamp(0, length - 1)
    folded = index.remainder(2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)

"""Map patches of images or volumes to tokens (linear or convolutional), and add positions."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool3d, gelu, interpolate, linear


def cut_patches(images: Tensor, sides: Sequence[int]) -> Tensor:
    """Return patches (B, P, C·∏ sides) of images or volumes (B, C, *pixels), last axis fastest."""
    batch, channels, *sizes = images.shape
    lengths = []
    for size, side in zip(sizes, sides, strict=True):
        if size % side:
            raise ValueError(
                f"images of {'×'.join(map(str, sizes))} pixels cannot be cut into patches of "
                f"{'×'.join(map(str, sides))}"
            )
        lengths += [size // side, side]
    split = images.reshape(batch, channels, *lengths)
    grid = range(2, split.ndim, 2)
    within = range(3, split.ndim, 2)
    return split.permute(0, *grid, 1, *within).reshape(batch, -1, channels * math.prod(sides))


# ``proj`` has the shape of timm's convolution, so that its weights load; as patches do not overlap,
# a product with flattened patches is the same sum, and faster on CPU.
class PatchEmbed(nn.Module):
    """Map images (B, C, H, W), or volumes with three ``axes``, to tokens (B, P, width)."""

    def __init__(self, channels: int, patch: int, width: int, axes: int = 2) -> None:
        super().__init__()
        self.patch = patch
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[axes]
        self.proj = convolution(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        pixels = cut_patches(images, [self.patch] * (images.ndim - 2))
        return linear(pixels, self.proj.weight.flatten(1), self.proj.bias)


class NormedPatchEmbed(PatchEmbed):
    def __init__(self, channels: int, patch: int, width: int, eps: float) -> None:
        super().__init__(channels, patch, width)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(super().forward(images))


class PooledLinearStem(nn.Module):
    """Map volumes (B, C, D, H, W) to (B, P, width): ``pool``³ means per cube, then a linear map."""

    def __init__(self, channels: int, patch: int, width: int, pool: int) -> None:
        super().__init__()
        self.factor = patch // pool
        self.embed = PatchEmbed(channels, pool, width, axes=3)

    def forward(self, volumes: Tensor) -> Tensor:
        return self.embed(avg_pool3d(volumes, self.factor))


class ConvStem(nn.Module):
    """Map images (B, C, H, W) to (B, P, width): 3×3 convolutions of stride 2, a linear map.

    There is a convolution per factor 2 of the patch side (for an odd side one, of stride 1); the
    linear map covers the remaining factor, so each patch gives a token. Channels double from
    ``hidden``. The norm is over an image, as in ConvStem3d; the source's batch norm couples
    images. Source: Xiao et al. (2021), §4.
    """

    def __init__(self, channels: int, patch: int, width: int, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        halvings = (patch & -patch).bit_length() - 1  # factors 2 of the patch
        for stride in [2] * halvings or [1]:
            layers += [
                nn.Conv2d(channels, hidden, kernel_size=3, stride=stride, padding=1),
                nn.GroupNorm(1, hidden),
                nn.GELU(),
            ]
            channels = hidden
            hidden *= 2
            patch //= stride
        self.convolutions = nn.Sequential(*layers)
        self.embed = PatchEmbed(channels, patch, width)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(self.convolutions(images))


# Normalisation and GELU follow each convolution, through which a cube sees two voxels beyond its
# border. The norm is over all channels and voxels of a volume: a batch norm would couple volumes,
# and without a norm some trainings stay at the median age.
class ConvStem3d(nn.Module):
    """Map volumes (B, C, D, H, W) to (B, P, width): two 3³ convolutions, stride 2, a linear map."""

    def __init__(self, channels: int, patch: int, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(channels, hidden, kernel_size=3, stride=2, padding=1)
        self.second = nn.Conv3d(hidden, 2 * hidden, kernel_size=3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(1, channels) for channels in (hidden, 2 * hidden))
        self.embed = PatchEmbed(2 * hidden, patch // 4, width, axes=3)
        # channels last: halves the time of a forward pass in fp32 on the CPU
        for layer in (self.first, self.second):
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last_3d)

    def forward(self, volumes: Tensor) -> Tensor:
        values = gelu(self.norms[0](self.first(volumes)))
        return self.embed(gelu(self.norms[1](self.second(values))))


Grid = tuple[int, ...]  # tokens along each axis
Interpolation = Literal["bilinear", "bicubic"]
Normalisation = tuple[Sequence[float], Sequence[float]]  # means and stds of channels


def resize_positions(
    positions: Tensor,
    prefix: int,
    size: Grid,
    mode: Interpolation = "bilinear",
    old: Grid | None = None,  # None: square
) -> Tensor:
    """Interpolate position embeddings (1, prefix + patches, width) from ``old`` to ``size``."""
    # The first ``prefix`` embeddings (class and distillation token) do not change. Volumes are
    # interpolated linearly. Source: ViT (Dosovitskiy et al. 2021, §3.2); bicubic as in DeiT.
    special = positions[:, :prefix]
    patches = positions[:, prefix:]
    if old is None:
        old = (round(patches.shape[1] ** 0.5),) * 2
    old = tuple(old)
    if torch.Size(old).numel() != patches.shape[1] or len(old) != len(size):
        raise ValueError(
            f"{patches.shape[1]} position embeddings do not form a grid {list(old)} that can be "
            f"resized to {list(size)}"
        )
    if old == tuple(size):
        return positions
    grid = patches.reshape(1, *old, -1).movedim(-1, 1).float()
    if len(size) == 3:
        # torch has no antialiasing of volumes
        grid = interpolate(grid, size=size, align_corners=False, mode="trilinear")
    else:
        grid = interpolate(grid, size=size, align_corners=False, mode=mode, antialias=True)
    return torch.cat([special, grid.flatten(2).transpose(1, 2).to(positions.dtype)], dim=1)


def sinusoidal_positions(grid: Grid, width: int) -> Tensor:
    """Return fixed sinusoidal position embeddings (1, patches, width) of a grid."""
    # Each axis has an equal part of the width, first sines, then cosines, with wavelengths from 2π
    # to 2π·10⁴ patches. Source: Vaswani et al. (2017), §3.5, applied per axis.
    if width % (2 * len(grid)):
        raise ValueError(f"width {width} has no sine and cosine along each of {len(grid)} axes")
    number = width // (2 * len(grid))
    rates = torch.exp(-math.log(1e4) * torch.arange(number) / max(1, number - 1))
    along = [torch.arange(length) for length in grid]
    places = torch.stack(torch.meshgrid(*along, indexing="ij"), dim=-1).flatten(0, -2)
    angles = places[:, :, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1).unsqueeze(0)


def compute_renormalised_embedding(
    kernel: Tensor, bias: Tensor, old: Normalisation, new: Normalisation
) -> tuple[Tensor, Tensor]:
    """Convert a patch embedding from inputs normalised by ``old`` (means, stds) to ``new``."""
    # (x − m)/s = (s'/s) · (x − m')/s' + (m' − m)/s per channel.
    if len(old[0]) != len(new[0]) or tuple(map(tuple, old)) == tuple(map(tuple, new)):
        return kernel, bias
    axes = [1, -1, *[1] * (kernel.ndim - 2)]
    mean, std, new_mean, new_std = (
        torch.tensor(values, dtype=torch.float64, device=kernel.device).view(axes)
        for values in (*old, *new)
    )
    exact = kernel.double()
    shift = (exact * ((new_mean - mean) / std)).flatten(1).sum(dim=1)
    return (exact * (new_std / std)).to(kernel), (bias.double() + shift).to(bias)

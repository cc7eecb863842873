"""Patches to tokens: timm's convolution weights, applied as one matrix product."""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool3d, gelu, linear


def cut(images: Tensor, patch: int) -> Tensor:
    """Images or volumes (B, C, *pixels) to their patches (B, P, C·patch^axes), the last axis
    fastest, pixels channel by channel.

    Raises ValueError where patches do not tile them.
    """
    batch, channels, *sizes = images.shape
    if any(size % patch for size in sizes):
        raise ValueError(
            f"images of {'×'.join(map(str, sizes))} pixels cannot be cut into patches of "
            f"{'×'.join([str(patch)] * len(sizes))}"
        )
    split = images.reshape(
        batch, channels, *[length for size in sizes for length in (size // patch, patch)]
    )
    grid = range(2, split.ndim, 2)
    within = range(3, split.ndim, 2)
    return split.permute(0, *grid, 1, *within).reshape(batch, -1, channels * patch ** len(sizes))


class PatchEmbed(nn.Module):
    """(B, C, H, W) images → (B, H/p · W/p, width) tokens in row-major order; volumes
    (B, C, D, H, W) with three ``axes``.

    ``proj`` has the shape of timm's convolution (width, C, p, p), so that its weights load; as
    patches do not overlap, the product over flattened patches is the same sum, and faster on CPU.
    """

    def __init__(self, channels: int, patch: int, width: int, axes: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.proj = {2: nn.Conv2d, 3: nn.Conv3d}[axes](
            channels, width, kernel_size=patch, stride=patch
        )

    def forward(self, images: Tensor) -> Tensor:
        return linear(cut(images, self.patch), self.proj.weight.flatten(1), self.proj.bias)


class PooledStem(nn.Module):
    """(B, C, D, H, W) → (B, P, width): each cube as ``pool``³ means, then a linear map; 64 times
    fewer weights at p = 16, pool = 4.
    """

    def __init__(self, channels: int, patch: int, width: int, pool: int) -> None:
        super().__init__()
        self.factor = patch // pool
        self.embed = PatchEmbed(channels, pool, width, axes=3)

    def forward(self, volumes: Tensor) -> Tensor:
        return self.embed(avg_pool3d(volumes, self.factor))


class ConvStem(nn.Module):
    """(B, C, D, H, W) → (B, P, width): two 3³ convolutions of stride 2 with normalisation and GELU,
    then a linear map of what each cube became.

    A cube sees two voxels beyond its border at the two convolutions. The norm is over a volume's
    channels and voxels (one group): a norm over the batch would couple volumes, and without one
    some trainings stay at the median age.
    """

    def __init__(self, channels: int, patch: int, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(channels, hidden, kernel_size=3, stride=2, padding=1)
        self.second = nn.Conv3d(hidden, 2 * hidden, kernel_size=3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(1, channels) for channels in (hidden, 2 * hidden))
        self.embed = PatchEmbed(2 * hidden, patch // 4, width, axes=3)
        # channels last: in fp32 half the time of a forward pass on the CPU
        for layer in (self.first, self.second):
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last_3d)

    def forward(self, volumes: Tensor) -> Tensor:
        values = gelu(self.norms[0](self.first(volumes)))
        return self.embed(gelu(self.norms[1](self.second(values))))

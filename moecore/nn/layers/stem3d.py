"""Two other ways from a cube of voxels to a token.

B volumes, C channels, D × H × W voxels, p side of a cube, P cubes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool3d, gelu

from moecore.nn.layers.patch_embed import PatchEmbed


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

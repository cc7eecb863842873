"""Patches to tokens: timm's convolution weights, applied as one matrix product."""

from torch import Tensor, nn
from torch.nn.functional import linear


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

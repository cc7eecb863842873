"""Patches to tokens: timm's convolution weights, applied as one matrix product."""

from torch import Tensor, nn
from torch.nn.functional import linear


class PatchEmbed(nn.Module):
    """(B, C, H, W) images → (B, H/p · W/p, width) tokens in row-major order.

    ``proj`` has the shape of timm's convolution (width, C, p, p), so that its weights load; as patches do not overlap,
    the product over flattened patches is the same sum, and faster on CPU.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        p = self.patch
        if height % p or width % p:
            raise ValueError(f"images of {height}×{width} pixels cannot be cut into patches of {p}×{p}")
        grid = images.reshape(batch, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        return linear(grid.reshape(batch, -1, channels * p * p), self.proj.weight.flatten(1), self.proj.bias)

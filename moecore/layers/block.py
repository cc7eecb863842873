"""One pre-norm transformer block with timm's parameter names."""

import torch
from torch import Tensor, nn

from moecore.layers.attention import Attention


class LayerScale(nn.Module):
    """Multiply (B, T, width) tokens by a learned vector (CaiT; ``gamma`` as in timm)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gamma


class Block(nn.Module):
    """x + attention(norm1(x)), then x + feed_forward(norm2(x)).

    ``mlp`` is dense or a mixture of experts: called with (B, T, width) tokens it returns (tokens, records).
    """

    def __init__(self, width: int, heads: int, mlp: nn.Module, qkv_bias: bool = True, layer_scale: float | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, qkv_bias)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, tuple]:
        """Returns (tokens, the feed-forward's input, its routing records)."""
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        entering = self.norm2(tokens)
        change, records = self.mlp(entering)
        return tokens + self.ls2(change), entering, records

"""One pre-norm transformer block with timm's parameter names."""

import torch
from torch import Tensor, nn

from moecore.core.records import RoutingContext
from moecore.nn.layers.attention import Attention
from moecore.nn.layers.feed_forward import FeedForward


class LayerScale(nn.Module):
    """Multiply (B, T, width) tokens by a learned vector (CaiT; ``gamma`` as in timm)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gamma


class Block(nn.Module):
    """x + attention(norm1(x)), then x + feed_forward(norm2(x)).

    ``mlp`` is dense or a mixture of experts: called with (B, T, width) tokens and a RoutingContext
    it returns (tokens, records); ``mlp.wants`` names the fields of the context that it reads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: FeedForward,
        qkv_bias: bool = True,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, qkv_bias)
        self.ls1 = _scale(width, layer_scale)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp
        self.ls2 = _scale(width, layer_scale)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, Tensor, tuple]:
        """Returns (tokens, the feed-forward's input, its routing records)."""
        attended, weights = self.attn(self.norm1(tokens), weights="attention" in self.mlp.wants)
        tokens = tokens + self.ls1(attended)
        entering = self.norm2(tokens)
        context = context._replace(
            attention=weights, attended=attended if "attended" in self.mlp.wants else None
        )
        change, records = self.mlp(entering, context)
        return tokens + self.ls2(change), entering, records


def _scale(width: int, initial: float | None) -> nn.Module:
    if initial is None:
        return nn.Identity()
    return LayerScale(width, initial)

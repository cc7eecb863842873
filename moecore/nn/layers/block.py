"""One pre-norm transformer block with timm's parameter names."""

import torch
from torch import Tensor, nn

from moecore.core.records import RoutingContext
from moecore.core.streams import bernoulli_like
from moecore.nn.layers.attention import Attention
from moecore.nn.layers.mlp import FeedForward


class LayerScale(nn.Module):
    """Multiply (B, T, width) tokens by a learned vector (CaiT; ``gamma`` as in timm)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, the change that a branch makes is left out
    of a sample with probability ``rate``, and divided by 1 − rate elsewhere.

    (B, T, width) to the same: in evaluation as they are, in training fp32 or wider. One draw a
    sample from the generator of the tokens' device, as in timm's layer of this name.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            return tokens
        keep = 1 - self.rate
        # fp32 under autocast too: bfloat16 would round 1 / keep, and bias every branch
        kept = bernoulli_like(torch.empty(len(tokens), 1, 1, device=tokens.device), keep)
        return tokens * (kept / keep)


def drop_rates(last: float, depth: int) -> list[float]:
    """The rate of stochastic depth of each of ``depth`` blocks: from 0 to ``last`` in equal steps
    (timm: a single block has 0).
    """
    return [last * index / max(1, depth - 1) for index in range(depth)]


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
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, qkv_bias)
        self.ls1 = _scale(width, layer_scale)
        self.drop_path1 = _drop_path(drop_path)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp
        self.ls2 = _scale(width, layer_scale)
        self.drop_path2 = _drop_path(drop_path)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, Tensor, tuple]:
        """Returns (tokens, the feed-forward's input, its routing records)."""
        attended, weights = self.attn(self.norm1(tokens), weights="attention" in self.mlp.wants)
        tokens = tokens + self.drop_path1(self.ls1(attended))
        entering = self.norm2(tokens)
        context = context._replace(
            attention=weights, attended=attended if "attended" in self.mlp.wants else None
        )
        change, records = self.mlp(entering, context)
        return tokens + self.drop_path2(self.ls2(change)), entering, records


def _scale(width: int, initial: float | None) -> nn.Module:
    if initial is None:
        return nn.Identity()
    return LayerScale(width, initial)


def _drop_path(rate: float) -> nn.Module:
    if rate == 0:
        return nn.Identity()  # draws nothing: a training without it keeps its random stream
    return DropPath(rate)

"""Attention inside windows and the blocks around it, with timm's names: Swin V1 (Liu et al. 2021),
Swin V2 (Liu et al. 2022), and Swin-MoE's mixture of the two (Hwang et al. 2023), which MoGE trains.

B images, T tokens of a grid, W windows of n tokens, h heads, d width.
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu, scaled_dot_product_attention

from moecore.core.routing_records import RoutingContext
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.layers.block import Block, FeedForward, trunc_normal_linear
from moecore.nn.layers.window_attention import Grid, Windows, to_build_device

SwinKind = Literal["swin", "swin_moe", "swin_v2"]

EPS = 1e-5  # of every norm
LOWEST_TEMPERATURE = 0.01  # of cosine attention
HIDDEN = 512  # of the MLP of a continuous position bias
FAR = 8.0  # the farthest place in a window, before the logarithm


@lru_cache(maxsize=64)
def pair_index(size: Grid) -> Tensor:
    """(n, n) int64: which of the (2·rows − 1)(2·columns − 1) differences of place a pair has."""
    with torch.device("cpu"):
        axes = torch.meshgrid(*(torch.arange(length) for length in size), indexing="ij")
        places = torch.stack(axes).flatten(1)
        apart = places[:, :, None] - places[:, None, :]
        rows, columns = (apart[axis] + length - 1 for axis, length in enumerate(size))
        return rows * (2 * size[1] - 1) + columns


@lru_cache(maxsize=64)
def log_coordinates(size: Grid, pretrained: Grid | None = None) -> Tensor:
    """((2·rows − 1)(2·columns − 1), 2): sign(d)·log₂(|d| + 1) / log₂ 8 of each difference of place
    d, where the farthest place of a window (of ``pretrained`` where given) is 8.
    """
    with torch.device("cpu"):
        axes = [
            torch.arange(1 - length, length, dtype=torch.float32) * FAR / max(1, before - 1)
            for length, before in zip(size, pretrained or size, strict=True)
        ]
        apart = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        return apart.sign() * torch.log2(apart.abs() + 1) / math.log2(FAR)


class ContinuousBias(nn.Sequential):
    """An MLP of the difference of place of two tokens: (…, 2) to (…, h)."""

    def __init__(self, heads: int) -> None:
        super().__init__(
            trunc_normal_linear(2, HIDDEN),
            nn.ReLU(),
            trunc_normal_linear(HIDDEN, heads, bias=False),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self[2](relu(self[0](input)))


class WindowAttention(nn.Module):
    """Self-attention of (B, T, d) inside windows, with a bias for each difference of place.

    swin: q·k/√(d/h) and a table of biases. swin_moe: the same with biases that an MLP gives.
    swin_v2: the cosine of q and k times a learned factor a head (at most 100), and 16·sigmoid of
    such biases; keys have no bias.
    Returns the attended tokens and, where asked for, the weights (B, T, T) averaged over heads.
    """

    pairs: Tensor
    coordinates: Tensor | None

    def __init__(
        self,
        kind: SwinKind,
        width: int,
        heads: int,
        windows: Windows,
        qkv_bias: bool = True,
        pretrained: Grid | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.heads = heads
        self.windows = windows
        cosine = kind == "swin_v2"
        self.qkv = trunc_normal_linear(width, 3 * width, bias=qkv_bias and not cosine)
        self.q_bias = self.v_bias = None
        if cosine and qkv_bias:
            self.q_bias = nn.Parameter(torch.zeros(width))
            self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = trunc_normal_linear(width, width)
        self.logit_scale: nn.Parameter | None = None
        if cosine:
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        coordinates = None
        if kind == "swin":
            number = math.prod(2 * length - 1 for length in windows.size)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(number, heads))
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        else:
            self.cpb_mlp = ContinuousBias(heads)
            coordinates = to_build_device(log_coordinates(windows.size, pretrained))
        pairs = to_build_device(pair_index(windows.size).flatten())
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("coordinates", coordinates, persistent=False)

    def forward(self, tokens: Tensor, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._project_heads(self.windows.cut(tokens))
        bias = self._add_window_mask(self.bias())
        if query.is_cuda and not weights:
            mixed = scaled_dot_product_attention(
                query, key, value, attn_mask=bias.to(query.dtype), scale=1.0
            )
            return self._merge_heads(mixed), None
        each = torch.softmax(query @ key.transpose(-2, -1) + bias, dim=-1)
        merged = self._merge_heads(each.to(value.dtype) @ value)
        if not weights:
            return merged, None
        mean = each.unflatten(1, (self.windows.number, self.heads)).mean(dim=2)
        return merged, self.windows.whole(mean)

    def bias(self) -> Tensor:
        """(h, n, n) fp32: what is added to the logits of each pair of a window."""
        if self.coordinates is None:
            table = self.relative_position_bias_table
        else:
            with full_precision(self.coordinates):
                table = self.cpb_mlp(self.coordinates.to(self.proj.weight.dtype))
        length = self.windows.length
        bias = table.index_select(0, self.pairs).t().view(self.heads, length, length)
        if self.kind == "swin_v2":
            return 16 * bias.sigmoid()
        return bias

    def _project_heads(self, cut: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Windows (B, W, n, d) to query, key and value (B, W·h, n, d/h); the query is scaled."""
        qkv = self.qkv(cut)
        if self.q_bias is not None and self.v_bias is not None:
            qkv = qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        batch, number, length, width = qkv.shape
        split = qkv.view(batch, number, length, 3, self.heads, width // (3 * self.heads))
        query, key, value = split.permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind(0)
        if self.logit_scale is None:
            return query * query.shape[-1] ** -0.5, key, value
        scale = self.logit_scale.clamp(max=-math.log(LOWEST_TEMPERATURE)).exp()
        scale = scale.repeat(number, 1, 1)
        query = normalize(query, dim=-1) * scale.to(query.dtype)
        return query, normalize(key, dim=-1), value

    def _add_window_mask(self, bias: Tensor) -> Tensor:
        """(W·h, n, n): the bias in every window, −∞ where tokens may not see each other."""
        mask = self.windows.mask
        if mask is None:
            return bias.repeat(self.windows.number, 1, 1)
        return (bias + mask[:, None]).flatten(0, 1)

    def _merge_heads(self, heads: Tensor) -> Tensor:
        split = heads.unflatten(1, (self.windows.number, self.heads))
        return self.proj(self.windows.join(split.transpose(2, 3).flatten(3)))


class PostNormBlock(Block):
    """x + norm1(attention(x)), then x + norm2(feed_forward(x)): Swin V2's. Gains start at 0.

    A mixture of experts with k = 1 gives its router almost no task gradient here: the norm takes
    away the length that the router's weight gave to what the expert said.
    """

    def __init__(
        self, width: int, attention: nn.Module, mlp: FeedForward, drop_path: float = 0.0
    ) -> None:
        super().__init__(width, attention, mlp, None, drop_path, EPS)
        for norm in (self.norm1, self.norm2):
            nn.init.zeros_(norm.weight)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, Tensor, tuple]:
        attended, weights = self.attn(tokens, weights="attention" in self.mlp.wants)
        tokens = tokens + self.drop_path1(self.norm1(attended))
        context = context.with_attention(self.mlp.wants, weights, attended)
        change, records = self.mlp(tokens, context)
        return tokens + self.drop_path2(self.norm2(change)), tokens, records

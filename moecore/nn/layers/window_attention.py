"""Attention in windows of tokens and the blocks of Swin, with timm's parameter names.

T tokens of a grid (columns fastest), W windows of n tokens, h heads.
"""

import math
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.layers.block import Block, BlockOutput, FeedForward, trunc_normal_linear

Grid = tuple[int, ...]

SwinKind = Literal["swin", "swin_moe", "swin_v2"]
EPS = 1e-5  # of every norm
MIN_TEMPERATURE = 0.01  # of cosine attention
BIAS_MLP_WIDTH = 512  # width of the MLP of a continuous position bias
MAX_DISTANCE = 8.0  # to which the largest distance in a window is scaled, before the logarithm


def window_and_shift(grid: Grid, window: int, shifted: bool) -> tuple[Grid, Grid]:
    """Return side and shift of windows along each axis; shift 0 if a window spans the grid."""
    sizes = tuple(min(window, length) for length in grid)
    shifts = tuple(
        size // 2 if shifted and size < length else 0
        for size, length in zip(sizes, grid, strict=True)
    )
    return sizes, shifts


# If the window does not divide the grid, the grid is padded at its ends, then shifted; on other
# grids, windows and masks are the paper's.
class Windows(nn.Module):
    """Cuts tokens (B, T, d) into windows (B, W, n, d), and joins windows to tokens."""

    places: Tensor
    back: Tensor
    # (W, n, n), 0 or −∞: separates parts of a window that do not touch in the image, and tokens
    # from padding; None if there are no such parts
    mask: Tensor | None

    def __init__(self, grid: Grid, window: int, shifted: bool) -> None:
        super().__init__()
        self.grid = grid
        self.size, self.shift = window_and_shift(grid, window, shifted)
        self.tokens = math.prod(grid)
        places, back, mask = _indices_and_mask(grid, self.size, self.shift)
        self.number, self.length = places.shape
        self.padded = places.numel() != self.tokens
        # not persistent: determined by the sizes
        self.register_buffer("places", to_default_device(places.flatten()), persistent=False)
        self.register_buffer("back", to_default_device(back), persistent=False)
        self.register_buffer("mask", to_default_device(mask), persistent=False)

    def cut(self, tokens: Tensor) -> Tensor:
        """Cut tokens (B, T, d) into windows (B, W, n, d), padded with 0."""
        cut = _GatherWindowTokens.apply(tokens, self.places, self.back, self.padded, False)
        return cut.unflatten(1, (self.number, self.length))

    def join(self, windows: Tensor) -> Tensor:
        """Join windows (B, W, n, d) to tokens (B, T, d) without padding."""
        flat = windows.flatten(1, 2)
        return _GatherWindowTokens.apply(flat, self.back, self.places, False, self.padded)

    def expand_attention(self, attention: Tensor) -> Tensor:
        """Convert attention in windows (B, W, n, n) to attention of all tokens (B, T, T)."""
        rows = self.places.view(self.number, self.length, 1)
        columns = rows.transpose(1, 2)
        is_token = (rows < self.tokens) & (columns < self.tokens)
        flat = torch.where(is_token, rows * self.tokens + columns, self.tokens**2).flatten()
        full_attention = attention.new_zeros(len(attention), self.tokens**2 + 1)
        full_attention = full_attention.index_copy(1, flat, attention.flatten(1))
        return full_attention[:, :-1].unflatten(1, (self.tokens, self.tokens))


class _GatherWindowTokens(Function):
    """Return ``values[:, index]``, 0 for index T; its gradient is a gather, as no index repeats."""

    @staticmethod
    # a context has no common type  # pyrefly: ignore[bad-override]
    def forward(
        ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, padded: bool, dropped: bool
    ) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.padded = padded
        ctx.dropped = dropped
        if padded:
            values = pad(values, (0, 0, 0, 1))
        return values.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyrefly: ignore[bad-override]
        index, inverse = ctx.saved_tensors
        to_values = _GatherWindowTokens.apply(gradient, inverse, index, ctx.dropped, ctx.padded)
        return to_values, None, None, None, None


def to_default_device(tensor: Tensor | None) -> Tensor | None:
    """Move a tensor to torch's default device, on which models are built; None stays None."""
    if tensor is None:
        return None
    return tensor.to(torch.get_default_device())


@lru_cache(maxsize=256)
def _indices_and_mask(grid: Grid, size: Grid, shift: Grid) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return token indices of windows (W, n), their inverse (T,), and attention mask (W, n, n)."""
    rows, columns = grid
    number = rows * columns  # the index of padding
    full = [math.ceil(length / side) * side for length, side in zip(grid, size, strict=True)]
    with torch.device("cpu"):
        tokens = torch.full(full, number, dtype=torch.int64)
        tokens[:rows, :columns] = torch.arange(number).view(rows, columns)
        tokens = torch.roll(tokens, [-offset for offset in shift], (0, 1))
        down, across = (
            (torch.arange(length) >= length - offset).long()
            for length, offset in zip(full, shift, strict=True)
        )
        labels = 2 * down[:, None] + across[None, :]  # tokens with equal labels attend
        labels = _cut_windows(labels.masked_fill(tokens == number, 4), size)
        places = _cut_windows(tokens, size)
        back = torch.empty(number + 1, dtype=torch.int64)
        back[places.flatten()] = torch.arange(places.numel())
        if places.numel() == number and not any(shift):
            return places, back[:number], None
        apart = labels[:, :, None] != labels[:, None, :]
        return places, back[:number], torch.zeros(apart.shape).masked_fill(apart, -math.inf)


def _cut_windows(values: Tensor, size: Grid) -> Tensor:
    down, across = (length // side for length, side in zip(values.shape, size, strict=True))
    cut = values.view(down, size[0], across, size[1]).transpose(1, 2)
    return cut.reshape(down * across, size[0] * size[1])


# An odd grid is padded with zeros at its ends. Names are timm's.
class PatchMerging(nn.Module):
    """Merge 2 × 2 tokens into one: (B, T, d) to (B, ⌈rows/2⌉·⌈columns/2⌉, 2d)."""

    def __init__(self, grid: Grid, width: int, post_norm: bool) -> None:
        super().__init__()
        self.grid = grid
        self.post_norm = post_norm  # the norm follows the linear map (Swin V2), else precedes it
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        nn.init.trunc_normal_(self.reduction.weight, std=0.02)
        self.norm = nn.LayerNorm(2 * width if post_norm else 4 * width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, columns = self.grid
        cells = tokens.unflatten(1, self.grid)
        if rows % 2 or columns % 2:
            cells = pad(cells, (0, 0, 0, columns % 2, 0, rows % 2))
        four = cells.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, r, 2, c, 2, d)
        four = four.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)
        if self.post_norm:
            return self.norm(self.reduction(four))
        return self.reduction(self.norm(four))


def merged_grid(grid: Grid) -> Grid:
    return tuple(math.ceil(length / 2) for length in grid)


@lru_cache(maxsize=64)
def index_relative_positions(size: Grid) -> Tensor:
    """Return the index (n, n) of each pair's relative position in the table of position biases."""
    with torch.device("cpu"):
        axes = torch.meshgrid(*(torch.arange(length) for length in size), indexing="ij")
        places = torch.stack(axes).flatten(1)
        apart = places[:, :, None] - places[:, None, :]
        rows, columns = (apart[axis] + length - 1 for axis, length in enumerate(size))
        return rows * (2 * size[1] - 1) + columns


@lru_cache(maxsize=64)
def log_relative_positions(size: Grid, pretrained: Grid | None = None) -> Tensor:
    """Return log-spaced coordinates of all relative positions in a window (Swin V2)."""
    # Shape ((2·rows − 1)(2·columns − 1), 2). The largest distance in a window (in ``pretrained``,
    # if given) is scaled to 8.
    with torch.device("cpu"):
        axes = [
            torch.arange(1 - length, length, dtype=torch.float32)
            * MAX_DISTANCE
            / max(1, before - 1)
            for length, before in zip(size, pretrained or size, strict=True)
        ]
        apart = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        return apart.sign() * torch.log2(apart.abs() + 1) / math.log2(MAX_DISTANCE)


# swin: q·k/√(d/h) and a table of biases. swin_moe: likewise, with biases from an MLP. swin_v2: the
# cosine of q and k times a learned factor per head (at most 100), and 16·sigmoid of such biases;
# keys have no bias. Returns tokens and, if requested, weights (B, T, T), mean over heads.
class WindowAttention(nn.Module):
    """Self-attention of (B, T, d) within windows, with a bias per relative position."""

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
            self.cpb_mlp = nn.Sequential(
                trunc_normal_linear(2, BIAS_MLP_WIDTH),
                nn.ReLU(),
                trunc_normal_linear(BIAS_MLP_WIDTH, heads, bias=False),
            )
            coordinates = to_default_device(log_relative_positions(windows.size, pretrained))
        pairs = to_default_device(index_relative_positions(windows.size).flatten())
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("coordinates", coordinates, persistent=False)

    def forward(self, tokens: Tensor, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._project_heads(self.windows.cut(tokens))
        bias = self.bias()
        if self.windows.mask is None:
            bias = bias.repeat(self.windows.number, 1, 1)
        else:  # −∞ between tokens that must not attend
            bias = (bias + self.windows.mask[:, None]).flatten(0, 1)
        if query.is_cuda and not weights:
            bias = bias.to(query.dtype)
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
            return self._merge_heads(mixed), None
        weights_by_head = torch.softmax(query @ key.transpose(-2, -1) + bias, dim=-1)
        merged = self._merge_heads(weights_by_head.to(value.dtype) @ value)
        if not weights:
            return merged, None
        mean = weights_by_head.unflatten(1, (self.windows.number, self.heads)).mean(dim=2)
        return merged, self.windows.expand_attention(mean)

    def bias(self) -> Tensor:
        """Return the bias (h, n, n), fp32, that is added to the attention logits in a window."""
        if self.coordinates is None:
            table = self.relative_position_bias_table
        else:
            with full_precision(self.coordinates):
                table = self.cpb_mlp(self.coordinates.to(self.proj.weight.dtype))
        length = self.windows.length
        bias = table.index_select(0, self.pairs).t().view(self.heads, length, length)
        return 16 * bias.sigmoid() if self.kind == "swin_v2" else bias

    def _project_heads(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (scaled), key and value (B, W·h, n, d/h) of windows (B, W, n, d)."""
        qkv = self.qkv(windows)
        if self.q_bias is not None and self.v_bias is not None:
            qkv = qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        batch, number, length, width = qkv.shape
        split = qkv.view(batch, number, length, 3, self.heads, width // (3 * self.heads))
        query, key, value = split.permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind(0)
        if self.logit_scale is None:
            return query * query.shape[-1] ** -0.5, key, value
        scale = self.logit_scale.clamp(max=-math.log(MIN_TEMPERATURE)).exp()
        scale = scale.repeat(number, 1, 1)
        query = normalize(query, dim=-1) * scale.to(query.dtype)
        return query, normalize(key, dim=-1), value

    def _merge_heads(self, heads: Tensor) -> Tensor:
        split = heads.unflatten(1, (self.windows.number, self.heads))
        return self.proj(self.windows.join(split.transpose(2, 3).flatten(3)))


class PostNormBlock(Block):
    """x + norm1(attention(x)), then x + norm2(feed_forward(x)): Swin V2. Gains start at 0."""

    def __init__(
        self, width: int, attention: nn.Module, mlp: FeedForward, drop_path: float = 0.0
    ) -> None:
        super().__init__(width, attention, mlp, None, drop_path, EPS)
        for norm in (self.norm1, self.norm2):
            nn.init.zeros_(norm.weight)

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> BlockOutput:
        attended, weights = self.attn(tokens, weights="attention" in self.mlp.wants)
        tokens = tokens + self.drop_path1(self.norm1(attended))
        context = context.with_attention(self.mlp.wants, weights, attended)
        change, records = self.mlp(tokens, context)
        return tokens + self.drop_path2(self.norm2(change)), tokens, records

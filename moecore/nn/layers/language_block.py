"""Blocks of MomentumSMoE (Teo & Nguyen 2024): post-norm, a second residual around feed-forward.

B streams, M tokens of a block, width d. f is the feed-forward after dropout.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from moecore.core.ranks import all_gather_rows, current_ranks
from moecore.core.routing_records import RoutingContext
from moecore.core.streams import draw_bernoulli_mask
from moecore.nn.layers.block import FeedForward


class Dropout(nn.Module):
    """Dropout of values (B, …), drawn for the whole batch; this rank has a part of it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return values
        mask = draw_bernoulli_mask(torch.empty_like(values, requires_grad=False), 1 - self.rate)
        return values * (mask / (1 - self.rate))


class SlidingWindowAttention(nn.Module):
    """Attention of token t to the L tokens before it, excluding itself.

    logit(t, j) = (q_t · k_{t−L+j} + q_t · p_j) / √e for j = 0 … L−1, softmax over j.

    ``positions`` (e, L), p, is shared by all heads, and by all layers that get it. Maps have no
    bias.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.dropout = Dropout(dropout)

    def forward(
        self, tokens: Tensor, before: Tensor, positions: Tensor, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return attended tokens (B, M, d), for tokens (B, M, d) after ``before`` (B, L, d).

        With ``weights`` also the weights within the block, (B, M, M), averaged over heads; tokens
        before the block are excluded, so that rows sum to less than 1.
        """
        all_tokens = torch.cat([before.to(tokens.dtype), tokens], dim=1)
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(tokens), self.key(all_tokens), self.value(all_tokens))
        )
        logits = undo_relative_shift(query @ key.transpose(-2, -1))
        logits = logits + query @ positions.to(query.dtype)
        share = torch.softmax(logits.float() * query.shape[-1] ** -0.5, dim=-1).to(value.dtype)
        shifted = relative_shift(self.dropout(share))
        attended = self.proj((shifted @ value).transpose(1, 2).flatten(2))
        if not weights:
            return attended, None
        return attended, relative_shift(share).mean(dim=1)[..., -tokens.shape[1] :]


def undo_relative_shift(values: Tensor) -> Tensor:
    """Return (…, M, L) of (…, M, L + M): row t keeps its columns t … t + L − 1."""
    *lead, block, total = values.shape
    flat = pad(values.flatten(-2), (0, block))
    return flat.view(*lead, block, total + 1)[..., : total - block]


def relative_shift(values: Tensor) -> Tensor:
    """Return (…, M, L + M) of (…, M, L): row t starts at column t, all else is 0."""
    *lead, block, span = values.shape
    flat = pad(values, (0, block + 1)).flatten(-2)
    return flat[..., : block * (span + block)].view(*lead, block, span + block)


MU = 0.7  # decay of the momentum per layer
GAMMA_1 = 1.0  # step of Adam's first layer; without effect, as a norm follows
GAMMA_2 = 1.0  # step of the momentum
BETAS = (0.9, 0.999)
EPS = 1e-8  # under the root


class BlockState(NamedTuple):
    """State between blocks: tokens (B, M, d), and the momentum (B, M, d) or None."""

    tokens: Tensor
    momentum: Tensor | None = None


class ReluMlp(FeedForward):
    """Linear, ReLU, dropout, Linear over (B, M, d) tokens, with torch's initial weights."""

    activation = "relu"

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, tuple[()]]:
        return self.fc2(self.dropout(relu(self.fc1(tokens)))), ()


class LanguageBlock(nn.Module):
    """h ← LN₁(h + attention(h)), s = LN(h + f(h)), h ← LN₂(h + s), with two residuals.

    With momentum m ← μ m + γ₂ f(h) and s = LN(h − m).
    """

    def __init__(self, width: int, heads: int, mlp: FeedForward, dropout: float) -> None:
        super().__init__()
        self.attn = SlidingWindowAttention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(
        self, state: BlockState, before: Tensor, positions: Tensor, context: RoutingContext
    ) -> tuple[BlockState, Tensor, tuple]:
        """Return the output, the feed-forward's input, and records; before: L tokens (B, L, d)."""
        tokens = state.tokens
        wants = self.mlp.wants
        attended, weights = self.attn(tokens, before, positions, weights="attention" in wants)
        entering = self.norm1(tokens + attended)
        context = context.with_attention(wants, weights, attended)
        change, records = self.mlp(entering, context)
        inner, momentum = self.inner_residual(entering, self.dropout(change), state.momentum)
        return BlockState(self.norm2(entering + self.norm(inner)), momentum), entering, records

    def inner_residual(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inner norm's input, and the momentum for the next block."""
        return tokens + change, None


class MomentumBlock(LanguageBlock):
    """A block with the momentum of previous blocks, 0 in the first."""

    def inner_residual(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        momentum = GAMMA_2 * change if momentum is None else MU * momentum + GAMMA_2 * change
        return tokens - momentum, momentum


class AdamBlock(MomentumBlock):
    """The first block of AdamSMoE: s = LN(−γ₁ p / √(v + ε)) with p = (1 − β₁) f, v = (1 − β₂) f².

    Moments are not accumulated over blocks, and the tokens cancel (MoGE's and MomentumSMoE's code;
    both papers' text adds them). Later blocks are a MomentumBlock.
    """

    def inner_residual(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        _, momentum = super().inner_residual(tokens, change, momentum)
        first = (1 - BETAS[0]) * change
        second = (1 - BETAS[1]) * change.float().square()
        return -GAMMA_1 * first / torch.sqrt(second + EPS), momentum


class SegmentMemory(nn.Module):
    """Inputs of all blocks at the last L tokens of the batch's streams, (depth, B, L, d) fp32."""

    states: Tensor

    def __init__(self, depth: int, streams: int, span: int, width: int) -> None:
        super().__init__()
        self.register_buffer("states", torch.zeros(depth, streams, span, width))

    def clear(self) -> None:
        self.states.zero_()

    def local_states(self) -> Tensor:
        """Return the states of this rank's streams, (depth, b, L, d)."""
        rows = current_ranks().rows(self.states.shape[1])
        return self.states if rows is None else self.states[:, rows.to(self.states.device)]

    def store_states(self, local: Tensor) -> None:
        """Store the new states of this rank's streams, and all other ranks."""
        self.states = all_gather_rows(local.transpose(0, 1)).transpose(0, 1).contiguous()

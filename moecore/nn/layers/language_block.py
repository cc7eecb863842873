"""Blocks of MomentumSMoE's language models (Teo & Nguyen 2024): post-norm, with a second residual
around the feed-forward.

B streams, M tokens of a block, d width. f is the feed-forward, dense or a mixture of experts, after
its dropout.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from moecore.core.records import RoutingContext
from moecore.nn.layers.mlp import FeedForward
from moecore.nn.layers.span_attention import Dropout, SpanAttention

MU = 0.7  # how much of the momentum goes on to the next layer
GAMMA_1 = 1.0  # step of Adam's first layer; a norm follows it, so it changes nothing
GAMMA_2 = 1.0  # step of the momentum
BETAS = (0.9, 0.999)
EPS = 1e-8  # under the root


class Through(NamedTuple):
    """What goes from block to block: tokens (B, M, d), and the momentum (B, M, d) or None."""

    tokens: Tensor
    momentum: Tensor | None = None


class ReluMlp(FeedForward):
    """Linear, ReLU, dropout, Linear over (B, M, d) tokens: the dense feed-forward of these models,
    with torch's initial weights.
    """

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
    """h ← LN₁(h + attention(h)), s = LN(h + f(h)), h ← LN₂(h + s): the residual stands twice.

    With momentum m ← μ m + γ₂ f(h) and s = LN(h − m).
    """

    def __init__(self, width: int, heads: int, mlp: FeedForward, dropout: float) -> None:
        super().__init__()
        self.attn = SpanAttention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(
        self, through: Through, before: Tensor, positions: Tensor, context: RoutingContext
    ) -> tuple[Through, Tensor, tuple]:
        """before: (B, L, d), the block's input at the L tokens before. Returns what goes on, the
        feed-forward's input (B, M, d), and its routing records.
        """
        tokens = through.tokens
        wants = self.mlp.wants
        attended, weights = self.attn(tokens, before, positions, weights="attention" in wants)
        entering = self.norm1(tokens + attended)
        context = context._replace(
            attention=weights, attended=attended if "attended" in wants else None
        )
        change, records = self.mlp(entering, context)
        inner, momentum = self.inner(entering, self.dropout(change), through.momentum)
        return Through(self.norm2(entering + self.norm(inner)), momentum), entering, records

    def inner(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the inner norm takes, and the momentum for the next block."""
        return tokens + change, None


class MomentumBlock(LanguageBlock):
    """With the momentum of the blocks before; it is 0 at the first one."""

    def inner(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        momentum = GAMMA_2 * change if momentum is None else MU * momentum + GAMMA_2 * change
        return tokens - momentum, momentum


class AdamBlock(MomentumBlock):
    """The first block of AdamSMoE: s = LN(−γ₁ p / √(v + ε)) with p = (1 − β₁) f, v = (1 − β₂) f².

    Its moments are never accumulated over blocks, and the tokens cancel (MoGE's and MomentumSMoE's
    code; both papers' text adds them). The blocks after it are a MomentumBlock.
    """

    def inner(
        self, tokens: Tensor, change: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        _, momentum = super().inner(tokens, change, momentum)
        first = (1 - BETAS[0]) * change
        second = (1 - BETAS[1]) * change.float().square()
        return -GAMMA_1 * first / torch.sqrt(second + EPS), momentum

"""Attention over the L tokens before each token, as MomentumSMoE's language models have it.

B streams, M tokens of a block, L tokens of the span, H heads, e = d / H width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.core.streams import bernoulli_like


class Dropout(nn.Module):
    """In training a number is 0 with probability ``rate`` and divided by 1 − rate elsewhere; draws
    are of the whole batch, whichever part of it this is.

    values: (B, …), the first axis that of the batch.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return values
        kept = bernoulli_like(torch.empty_like(values, requires_grad=False), 1 - self.rate)
        return values * (kept / (1 - self.rate))


class SpanAttention(nn.Module):
    """Token t attends to the L tokens before it, and not to itself:

    logit(t, j) = (q_t · k_{t−L+j} + q_t · p_j) / √e for j = 0 … L−1, softmax over j.

    ``positions`` (e, L), p, is one for all heads, and of all layers that share it. Maps have no
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
        """tokens (B, M, d) after the L tokens ``before`` (B, L, d): what is attended, (B, M, d).

        With ``weights`` also how much of each token of the block, (B, M, M), mean over heads; what
        lies before the block is left out, so rows sum to less than 1.
        """
        block = tokens.shape[1]
        every = torch.cat([before.to(tokens.dtype), tokens], dim=1)
        query, key, value = self._split(self.query(tokens), self.key(every), self.value(every))
        logits = upright(query @ key.transpose(-2, -1)) + query @ positions.to(query.dtype)
        share = torch.softmax(logits.float() * query.shape[-1] ** -0.5, dim=-1).to(value.dtype)
        slanted = slant(self.dropout(share))
        attended = self.proj((slanted @ value).transpose(1, 2).flatten(2))
        if not weights:
            return attended, None
        return attended, slant(share).mean(dim=1)[..., -block:]

    def _split(self, *each: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in each)


def upright(values: Tensor) -> Tensor:
    """(…, M, L + M) to (…, M, L): row t keeps its columns t … t + L − 1."""
    *lead, block, whole = values.shape
    flat = pad(values.flatten(-2), (0, block))
    return flat.view(*lead, block, whole + 1)[..., : whole - block]


def slant(values: Tensor) -> Tensor:
    """(…, M, L) to (…, M, L + M): row t begins at column t, all else is 0; undoes ``upright``."""
    *lead, block, span = values.shape
    flat = pad(values, (0, block + 1)).flatten(-2)
    return flat[..., : block * (span + block)].view(*lead, block, span + block)

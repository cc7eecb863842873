"""Quantile balancing: set each expert's bias so that an even share of tokens chooses it."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import files, ranks
from moecore.core.config import Misfits, Surroundings
from moecore.nn.balances.base import Balance, BalanceModule


class Quantile(Balance):
    """After each step, set each expert's bias so that an even share of the tokens chooses it.

    A token's cut is its (k + 1)-th largest score + old bias, the best that was not chosen. An
    expert's new bias is the one with which its score + bias reaches the cut of an even share of the
    tokens (Kimi K3's report, §2.3.3). It shifts the choice in evaluation too, never the weights.
    """

    kind: Literal["quantile"] = "quantile"
    decay: float = Field(0.0, ge=0, lt=1, description="share of the old bias; 0: last batch only")

    def build(self, experts: int, k: int) -> "QuantileBias":
        return QuantileBias(self, experts, k)

    def check_k(self, k: int, experts: int) -> None:
        if k >= experts:
            raise files.UserError.at(
                "router.k",
                found=f"{k}, but quantile reads scores of unchosen experts, of {experts} in all",
                allowed=f"1 to {experts - 1}",
            )

    def misfits(self, around: Surroundings) -> Misfits:
        if around.tokens is None:
            return
        k = around.router.chosen_of(around.experts)
        experts = around.experts.choices
        if around.tokens * k < experts:
            text = f"found quantile, but a step has {around.tokens} tokens of {k} choices, fewer"
            yield (), f"{text} than {experts} experts; allowed: a larger batch"


class QuantileBias(BalanceModule):
    """Prefer experts by scores + ``bias`` (E,), initially 0."""

    bias: Tensor

    def __init__(self, config: Quantile, experts: int, k: int) -> None:
        super().__init__()
        self.config = config
        self.k = k
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias

    @torch.no_grad()
    def after_step(self, scores: Tensor, chosen: Tensor, progress: float) -> None:
        self.config.check_k(self.k, len(self.bias))
        needed = quantile_biases(ranks.all_gather_rows(scores).flatten(0, 1), self.bias, self.k)
        decay = self.config.decay
        self.bias.mul_(decay).add_((needed - needed.mean()) * (1 - decay))


def quantile_biases(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Return the biases (E,) that give each expert N·k/E tokens if the tokens' cuts stay fixed."""
    # scores: (N tokens, E). bias: (E,), by which k experts per token were chosen.
    tokens, experts = scores.shape
    if tokens * k < experts:
        raise files.UserError.at(
            "router.balance",
            found=f"a step of {tokens} tokens of {k} choices, fewer than {experts} experts",
            allowed="a larger batch",
        )
    # Cut: a token's (k + 1)-th largest score + bias; an expert reaches it with bias cut − score.
    needed = ((scores + bias).topk(k + 1, dim=-1).values[:, -1:] - scores).T
    # The quantile at N·k/E + 1/2, counted from 1 and interpolated linearly (Hazen).
    place = tokens * k / experts + 0.5
    low = math.floor(place)
    # search all N once, then only the smallest: half the time of two searches of all N
    smallest = needed.topk(min(low + 1, tokens), largest=False, sorted=False).values
    lower = smallest.kthvalue(low).values
    return lower + (place - low) * (smallest.amax(dim=-1) - lower)

"""Quantile balancing: each expert's bias is where its even share of tokens would choose it.

B images, T tokens per image, N = B·T of all ranks, E experts, k chosen per token.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.ranks import all_gather_rows
from moecore.core.surroundings import Misfits, Surroundings
from moecore.nn.balances.base import Balance, BalanceModule


class Quantile(Balance):
    """After a step each bias is the one with which the expert's score reaches the cuts of its even
    share of tokens. A cut is the largest biased score that a token did not choose; cuts are held,
    though any bias that changes moves them (Kimi K3's report, §2.3.3).

    The bias takes part in the choice in evaluation too, and never in the weights.
    """

    kind: Literal["quantile"] = "quantile"
    decay: float = Field(
        0.0, ge=0, lt=1, description="share of the old bias in the new; 0: the last batch's alone"
    )

    def build(self, experts: int, k: int) -> "QuantileBias":
        """Return the bias of so many experts, k of them a token."""
        return QuantileBias(self, experts, k)

    def check_k(self, k: int, experts: int) -> None:
        """Raise UserError where every expert is chosen: there is no first one that is not."""
        if k >= experts:
            problem = f"found {k}, and quantile balances what {experts} experts leave out"
            raise UserError(f"router.k: {problem}; allowed: 1 to {experts - 1}")

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield steps of so few tokens that not every expert has a share."""
        if around.tokens is None:
            return
        k, experts = around.router.chosen_of(around.experts), around.experts.choices
        if around.tokens * k < experts:
            text = f"found quantile, and a step has {around.tokens} tokens of {k} choices, fewer"
            yield (), f"{text} than {experts} experts; allowed: a larger batch"


class QuantileBias(BalanceModule):
    """``bias`` (E,), which begins at 0."""

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
        """Set the bias by the scores of the whole batch."""
        self.config.check_k(self.k, len(self.bias))
        needed = needed_biases(all_gather_rows(scores).flatten(0, 1), self.bias, self.k)
        decay = self.config.decay
        self.bias.mul_(decay).add_((needed - needed.mean()) * (1 - decay))


def needed_biases(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Return the biases (E,) at which each expert has N·k/E tokens, the tokens' cuts held.

    scores: (N, E).  bias: (E,), that the tokens chose by.  A token's cut is the (k + 1)-th largest
    of its scores + bias; an expert needs cut − score to be at it. Of these N numbers the one at
    the place N·k/E + 1/2 counted from 1, between two places on the line through both (Hazen).
    Raises UserError where an even share is less than one token.
    """
    tokens, experts = scores.shape
    if tokens * k < experts:
        problem = f"a step has {tokens} tokens of {k} choices, fewer than {experts} experts"
        raise UserError(f"router.balance: {problem}; allowed: a larger batch")
    cut = (scores + bias).topk(k + 1, dim=-1).values[:, -1:]
    needed = (cut - scores).T
    place = tokens * k / experts + 0.5
    low = math.floor(place)
    # one search among all N, and one among the few that it leaves: half the time of two
    smallest = needed.topk(min(low + 1, tokens), largest=False, sorted=False).values
    lower = smallest.kthvalue(low).values
    upper = smallest.amax(dim=-1)
    return lower + (place - low) * (upper - lower)

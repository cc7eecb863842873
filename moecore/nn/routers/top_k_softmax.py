"""The router of SMoE language models (MoGE, §3.2): top-k of the logits, then their softmax.

B sequences, T tokens each, E experts, k chosen per token, d width.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import Renormalise, router_logits


class TopKSoftmax(NoisyTopK):
    """A linear map with bias: the k largest logits choose, their softmax weighs (sum 1).

    All else is noisy top-k's. With k = 1 the weight is always 1: only regularizers, not the task,
    then teach it. No noise is drawn by default.
    """

    kind: Literal["top_k_softmax"] = "top_k_softmax"  # pyrefly: ignore[bad-override]
    k: int = Field(
        2, ge=1, description="experts per token; with 1 only regularizers teach the router"
    )
    noise_std: float = Field(
        0.0, ge=0, description="noise on the logits in training, in units of 1 / experts"
    )
    renormalise: Renormalise = Field(
        True, description="let the chosen gates sum to 1; see noisy_top_k"
    )

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TopKSoftmaxRouter":
        """The router of ``width``-wide tokens; UserError where k or groups do not fit."""
        self.check_experts(width, experts)
        return TopKSoftmaxRouter(self, width, experts)


class TopKSoftmaxRouter(NoisyTopKRouter):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: TopKSoftmax, width: int, experts: int) -> None:
        super().__init__(config, width, experts)
        bound = width**-0.5  # torch's start of a linear map, as in the language models' code
        if config.start == "normal":
            nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(nn.init.uniform_(torch.empty(experts), -bound, bound))

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits (B, T, E) of tokens (B, T, d), with a bias."""
        return router_logits(tokens, self.weight, self.bias)

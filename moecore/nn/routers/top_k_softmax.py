"""The router of SMoE language models (MoGE, §3.2): top-k of the logits, then their softmax."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.nn.routers.base import NoiseStd
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import Renormalise, router_logits


class TopKSoftmax(NoisyTopK):
    """Choose the k largest logits of a linear map with bias; weights are the softmax of these.

    All else is as in noisy_top_k, without noise by default. With k = 1 the weight is always 1, so
    that only regularizers teach the router, not the task.
    """

    kind: Literal["top_k_softmax"] = "top_k_softmax"  # pyrefly: ignore[bad-override]
    k: int = Field(2, ge=1, description="experts per token; 1: only regularizers teach the router")
    noise_std: NoiseStd = 0.0
    renormalise: Renormalise = Field(True, description="chosen gates sum to 1; see noisy_top_k")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TopKSoftmaxRouter":
        self.check_experts(width, experts)
        return TopKSoftmaxRouter(self, width, experts)


class TopKSoftmaxRouter(NoisyTopKRouter):
    def __init__(self, config: TopKSoftmax, width: int, experts: int) -> None:
        super().__init__(config, width, experts)
        bound = width**-0.5  # torch's initialisation, as in the language models' code
        if config.start == "normal":
            nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(nn.init.uniform_(torch.empty(experts), -bound, bound))

    def logits(self, tokens: Tensor) -> Tensor:
        return router_logits(tokens, self.weight, self.bias)

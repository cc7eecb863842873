"""The router of SMoE language models (MoGE, §3.2): top-k on the logits first, then a softmax over the chosen.

B sequences, T tokens each, E experts, k chosen per token, d width.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.dispatch import SparsePlan
from moecore.files import StageError
from moecore.records import RoutingContext, RoutingRecord
from moecore.routers.base import RouterConfig
from moecore.routers.decision import decision, router_logits, top_k


class TopKSoftmax(RouterConfig):
    """A linear map with bias scores the experts; the k largest logits choose, and a softmax over these k weighs them: weights sum to 1.

    With k = 1 the weight is always 1, so the router has no gradient from the task: only regularizers then teach it.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"load"})

    kind: Literal["top_k_softmax"] = "top_k_softmax"
    k: int = Field(default=2, ge=1, description="experts per token; with 1 the router learns from regularizers only, as its weight is always 1")
    noise_std: float = Field(default=0.0, ge=0, description="noise on the logits in training, in units of 1 / experts")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TopKSoftmaxRouter":
        """The router of ``width``-wide tokens over ``experts`` experts. Raises StageError where k is larger than that."""
        if self.k > experts:
            raise StageError(f"router.k is {self.k}, but there are {experts} experts (experts.number); k may be at most {experts}")
        return TopKSoftmaxRouter(self, width, experts)


class TopKSoftmaxRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord); ``probs`` is the softmax over all experts."""

    def __init__(self, config: TopKSoftmax, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))
        self.bias = nn.Parameter(torch.zeros(experts))

    def forward(self, tokens: Tensor, context: RoutingContext = RoutingContext()) -> tuple[SparsePlan, RoutingRecord]:
        with torch.autocast(tokens.device.type, enabled=False):
            return self.decide(router_logits(tokens, self.weight, self.bias))

    def decide(self, logits: Tensor) -> tuple[SparsePlan, RoutingRecord]:
        """The decision of these logits (B, T, E)."""
        experts = logits.shape[-1]
        std = self.config.noise_std / experts if self.training else 0.0
        noisy = logits + torch.randn_like(logits) * std if std else logits
        chosen = top_k(noisy, self.config.k)
        scores = noisy.gather(-1, chosen)
        return decision(
            logits=logits,
            probs=torch.softmax(logits, dim=-1),
            load=torch.special.ndtr((logits - scores[..., -1:]) / (std or 1 / experts)),  # as noisy_top_k's
            chosen=chosen,
            weights=torch.softmax(scores, dim=-1),
        )

"""The noisy top-k router of V-MoE (Riquelme et al. 2021), the baseline of every paper here.

B images, T tokens per image, E experts, k chosen per token, d width.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.dispatch import SparsePlan
from moecore.records import RoutingContext, RoutingRecord
from moecore.routers.base import RouterConfig
from moecore.routers.capacity import seated
from moecore.routers.decision import decision, router_logits, top_k


class NoisyTopK(RouterConfig):
    """Softmax over a linear map of the token; in training noise is added to the logits; the k largest gates choose."""

    provides: ClassVar[frozenset[str]] = frozenset({"load"})

    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(default=2, ge=1, description="experts per token")
    noise_std: float = Field(default=1.0, ge=0, description="noise on the logits in training, in units of 1 / experts")
    capacity_factor: float | None = Field(default=None, gt=0, description="seats per expert in training, relative to an even share; null: no limit")
    batch_priority: bool = Field(default=False, description="seat tokens in the order of their largest gate instead of their position")
    group_size: int = Field(default=8, ge=1, description="images that share their seats")
    renormalise: bool = Field(default=False, description="let the chosen gates sum to 1 (with k = 1 the router then has no task gradient)")
    task_gradient: bool = Field(default=True, description="false: the router learns from its losses only (TGR's `distillation only`)")

    @model_validator(mode="after")
    def _priority_needs_seats(self) -> "NoisyTopK":
        if self.batch_priority and self.capacity_factor is None:
            raise ValueError("`batch_priority` decides who gets a seat: give `capacity_factor` too")
        return self

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "NoisyTopKRouter":
        """The router of ``width``-wide tokens over ``experts`` experts. Raises StageError where k is larger than that."""
        self.check_k(experts)
        return NoisyTopKRouter(self, width, experts)


class NoisyTopKRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    Logits are fp32 whatever the autocast dtype: in bf16, ties at the k-th place flip. Gates are a softmax over all experts
    before the choice and are not renormalised after it, so that k = 1 still has a task gradient. Capacity holds in training
    only: it couples the images of a batch, so evaluation and attacks drop nothing.
    """

    def __init__(self, config: NoisyTopK, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))  # as the ViT's other linears

    def forward(self, tokens: Tensor, context: RoutingContext = RoutingContext()) -> tuple[SparsePlan, RoutingRecord]:
        with torch.autocast(tokens.device.type, enabled=False):
            return self.decide(router_logits(tokens, self.weight))

    def decide(self, logits: Tensor) -> tuple[SparsePlan, RoutingRecord]:
        """The decision of these logits (B, T, E)."""
        experts, std = logits.shape[-1], self._noise()
        noisy = logits + torch.randn_like(logits) * std if std else logits
        gates = torch.softmax(noisy, dim=-1)
        chosen = top_k(noisy, self.config.k)
        best = noisy.gather(-1, chosen)
        return decision(
            logits=logits,
            probs=torch.softmax(logits, dim=-1),
            load=torch.special.ndtr((logits - best[..., -1:]) / (std or 1 / experts)),  # 1 − Φ((τ − logits)/σ)
            chosen=chosen,
            weights=self._weights(best, gates.gather(-1, chosen)),
            kept=self._kept(chosen, gates),
        )

    def _weights(self, logits: Tensor, gates: Tensor) -> Tensor:
        """Weights (B, T, k) from the noisy logits and the gates of the chosen, both (B, T, k)."""
        weights = torch.softmax(logits, dim=-1) if self.config.renormalise else gates  # = gates / their sum
        return weights if self.config.task_gradient else weights.detach()

    def _noise(self) -> float:
        """Standard deviation of the noise; where none is drawn, ``load`` is smoothed by 1 / experts (DEFINITIONS: balance losses)."""
        return self.config.noise_std / len(self.weight) if self.training else 0.0

    def _kept(self, chosen: Tensor, gates: Tensor) -> Tensor | None:
        settings = self.config
        if not self.training or settings.capacity_factor is None:
            return None
        priority = gates.detach().amax(dim=-1) if settings.batch_priority else None
        return seated(chosen, priority, gates.shape[-1], settings.capacity_factor, settings.group_size)

"""The noisy top-k router of V-MoE (Riquelme et al. 2021), the baseline of every paper here.

B images, T tokens per image, E experts, k chosen per token, d width.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear

from moecore.config import Config
from moecore.dispatch import SparsePlan
from moecore.files import StageError
from moecore.records import RoutingRecord
from moecore.routers.capacity import seated


class NoisyTopK(Config):
    """Softmax over a linear map of the token; in training noise is added to the logits; the k largest gates choose."""

    provides: ClassVar[frozenset[str]] = frozenset({"load"})

    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(default=2, ge=1, description="experts per token")
    noise_std: float = Field(default=1.0, ge=0, description="noise on the logits in training, in units of 1 / experts")
    capacity_factor: float | None = Field(default=None, gt=0, description="seats per expert in training, relative to an even share; null: no limit")
    batch_priority: bool = Field(default=False, description="seat tokens in the order of their largest gate instead of their position")
    group_size: int = Field(default=8, ge=1, description="images that share their seats")

    @model_validator(mode="after")
    def _priority_needs_seats(self) -> "NoisyTopK":
        if self.batch_priority and self.capacity_factor is None:
            raise ValueError("`batch_priority` decides who gets a seat: give `capacity_factor` too")
        return self

    def build(self, width: int, experts: int) -> "NoisyTopKRouter":
        """The router of ``width``-wide tokens over ``experts`` experts. Raises StageError where k is larger than that."""
        if self.k > experts:
            raise StageError(f"router.k is {self.k}, but there are {experts} experts (experts.number); k may be at most {experts}")
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

    def forward(self, tokens: Tensor) -> tuple[SparsePlan, RoutingRecord]:
        with torch.autocast(tokens.device.type, enabled=False):
            return self._route(self._logits(tokens))

    def _logits(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return linear(tokens.to(dtype), self.weight.to(dtype))

    def _route(self, logits: Tensor) -> tuple[SparsePlan, RoutingRecord]:
        experts, std = logits.shape[-1], self._noise()
        noisy = logits + torch.randn_like(logits) * std if std else logits
        gates = torch.softmax(noisy, dim=-1)
        chosen = top_k(noisy, self.config.k)
        plan = SparsePlan.build(chosen, gates.gather(-1, chosen), self._kept(chosen, gates), experts)
        threshold = noisy.gather(-1, chosen[..., -1:])
        return plan, RoutingRecord(
            logits=logits,
            probs=torch.softmax(logits, dim=-1),
            load=torch.special.ndtr((logits - threshold) / (std or 1 / experts)),  # 1 − Φ((τ − logits)/σ)
            chosen=torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True),
            combine=torch.zeros_like(logits).scatter(-1, chosen, plan.weights),
        )

    def _noise(self) -> float:
        """Standard deviation of the noise; where none is drawn, ``load`` is smoothed by 1 / experts (DEFINITIONS: balance losses)."""
        return self.config.noise_std / len(self.weight) if self.training else 0.0

    def _kept(self, chosen: Tensor, gates: Tensor) -> Tensor | None:
        settings = self.config
        if not self.training or settings.capacity_factor is None:
            return None
        priority = gates.detach().amax(dim=-1) if settings.batch_priority else None
        return seated(chosen, priority, gates.shape[-1], settings.capacity_factor, settings.group_size)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices (..., k) of the k largest scores (..., E), best first; ties go to the lowest index.

    k times argmax: ``topk`` promises no order among ties, and a stable sort takes 20 times longer at 400 experts.
    """
    left, found = scores.detach().clone(), []
    for _ in range(k):
        best = left.argmax(dim=-1, keepdim=True)
        found.append(best)
        left.scatter_(-1, best, -torch.inf)
    return torch.cat(found, dim=-1)

"""ReLU routing (ReMoE, Wang et al. 2024): every expert whose logit is above 0."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Misfits, Surroundings
from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import RoutingRecord
from moecore.nn.routers import base, noisy_top_k


class Relu(base.Router):
    """Weight experts by the ReLU of their logits, without normalising; a token uses 0 to E experts.

    The loss ``adaptive_l1`` moves their mean number to ``k``. Every slot is computed, so fewer
    experts save no time, and the first steps are nearly dense.
    """

    own_loss: ClassVar[str | None] = "adaptive_l1"

    kind: Literal["relu"] = "relu"
    k: int = Field(2, ge=1, description="mean experts per token, the target of adaptive_l1")
    l1_start: float = Field(1e-8, gt=0, description="weight of adaptive_l1 at the start (λ)")
    l1_factor: float = Field(
        1.2, gt=1, description="multiplies (divides) λ after a step of too many (few) experts"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        experts = 0 if around.experts is None else around.experts.choices
        if experts and self.chosen_of(around.experts) >= experts:
            text = f"found {self.k}, and with {experts} experts relu then excludes none"
            yield ("k",), f"{text}; allowed: 1 to {experts - 1}"

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"sparsity"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "ReluRouter":
        self.check_k(experts)
        return ReluRouter(self, width, experts)


# ``l1_weight`` () is λ, equal in all layers of a model. probs are the weights over their sum, or
# 1/E each if all are 0.
class ReluRouter(noisy_top_k.NoisyTopKRouter):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    l1_weight: Tensor

    def __init__(self, config: Relu, width: int, experts: int) -> None:
        shape = noisy_top_k.NoisyTopK(k=experts, noise_std=0.0).model_copy(update={"score": "relu"})
        super().__init__(shape, width, experts)
        self.k = config.k
        self.experts = experts
        self.factor = config.l1_factor
        self.register_buffer("l1_weight", torch.tensor(config.l1_start))

    def valid_slots(self, scores: Tensor) -> Tensor:
        return scores > 0

    @torch.no_grad()
    def after_step(self, records: Sequence[RoutingRecord], place: int, progress: float) -> None:
        """Increase λ if a step used more than k experts per token on average; decrease if fewer."""
        if self.is_learning:
            chosen = [record.chosen for record in records]
            used = torch.stack([mask.sum() for mask in chosen]).sum()
            slots = torch.full_like(used, sum(mask.numel() for mask in chosen))
            used, slots = total_over_ranks(torch.stack([used, slots]))
            self.l1_weight *= self.factor ** torch.sign(self.experts * used - self.k * slots)

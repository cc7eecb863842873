"""ReLU routing (ReMoE, Wang et al. 2024): every expert whose logit is above 0, as many as a weight
that follows their number allows.

B images, T tokens per image, E experts, d width.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import RoutingRecord
from moecore.core.surroundings import Misfits, Surroundings
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter


class Relu(Router):
    """Weights are ReLU of the logits, not normalised; a token may have no expert, or all.

    The loss ``adaptive_l1`` brings their mean number to ``k``. Every slot is computed, so fewer
    experts save no time yet, and the first steps are nearly dense.
    """

    own_loss: ClassVar[str | None] = "adaptive_l1"

    kind: Literal["relu"] = "relu"
    k: int = Field(2, ge=1, description="experts per token on average, the aim of adaptive_l1")
    l1_start: float = Field(1e-8, gt=0, description="weight of adaptive_l1 at the start (λ)")
    l1_factor: float = Field(
        1.2, gt=1, description="λ times or over this after a step of too many or too few experts"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a k that is no aim: with all experts no weight of the loss is too small."""
        yield from super().misfits(around)
        experts = 0 if around.experts is None else around.experts.choices
        if experts and self.chosen_of(around.experts) >= experts:
            text = f"found {self.k}, and of {experts} experts relu then leaves out none"
            yield ("k",), f"{text}; allowed: 1 to {experts - 1}"

    @property
    def provides(self) -> frozenset[str]:
        """Return what its record and module give beyond probs."""
        return frozenset({"sparsity"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "ReluRouter":
        """The router of ``width``-wide tokens; UserError where k is above ``experts``."""
        self.check_k(experts)
        return ReluRouter(self, width, experts)


class ReluRouter(NoisyTopKRouter):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    ``l1_weight`` () is λ, the same in all layers of a model. probs are the weights over their sum,
    1/E each where all are 0.
    """

    l1_weight: Tensor

    def __init__(self, config: Relu, width: int, experts: int) -> None:
        shape = NoisyTopK(k=experts, noise_std=0.0).model_copy(update={"score": "relu"})
        super().__init__(shape, width, experts)
        self.k, self.experts = config.k, experts
        self.factor = config.l1_factor
        self.register_buffer("l1_weight", torch.tensor(config.l1_start))

    def valid_slots(self, scores: Tensor) -> Tensor:
        """Return which experts have a weight, (B, T, E) bool, each token's best first."""
        return scores > 0

    @torch.no_grad()
    def after_step(self, records: Sequence[RoutingRecord], place: int, progress: float) -> None:
        """End a training step: λ grows where more experts than the aim were used, over all layers
        and ranks, and shrinks where fewer were.
        """
        if self.is_learning:
            chosen = [record.chosen for record in records]
            used = torch.stack([one.sum() for one in chosen]).sum()
            slots = torch.full_like(used, sum(one.numel() for one in chosen))
            used, slots = total_over_ranks(torch.stack([used, slots]))
            self.l1_weight *= self.factor ** torch.sign(self.experts * used - self.k * slots)

"""As many experts as a token needs to gather a share of its probability (Huang et al. 2024).

B images, T tokens per image, E experts, k slots of a token, d width.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from moecore.core.surroundings import Misfits, Surroundings
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter


class TopP(Router):
    """The fewest most probable experts whose probs sum to more than ``threshold``, weighted by
    these probs.

    Sure tokens use one expert, unsure ones several; the loss ``entropy`` makes tokens surer.
    Every slot up to ``k`` is computed, so fewer experts save no time yet.
    """

    kind: Literal["top_p"] = "top_p"
    threshold: float = Field(0.4, gt=0, lt=1, description="sum of probs that is enough")
    k: int | None = Field(None, ge=1, description="experts per token at most; null: all of them")
    noise_std: float = Field(
        0.0, ge=0, description="noise on the logits in training, in units of 1 / experts"
    )
    balance: LossFree | None = Field(
        None, description="a bias on the order in which a token gathers experts; null: none"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a k that leaves nothing to decide."""
        yield from super().misfits(around)
        if self.k == 1:
            yield ("k",), "found 1: each token then has its first expert; allowed: null, or above 1"

    def active(self, experts: int) -> float:
        """Return the most experts that a token may use: how many it does depends on the tokens."""
        return self.k or experts

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TopPRouter":
        """The router of ``width``-wide tokens; UserError where k is above ``experts``."""
        most = NoisyTopK(k=self.k or experts, noise_std=self.noise_std, balance=self.balance)
        most.check_k(experts)
        return TopPRouter(most, width, experts, self.threshold)


class TopPRouter(NoisyTopKRouter):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: NoisyTopK, width: int, experts: int, threshold: float) -> None:
        super().__init__(config, width, experts)
        self.threshold = threshold

    def valid_slots(self, scores: Tensor) -> Tensor:
        """Return which of its k first experts a token needs, (B, T, k) bool, by their probs."""
        before = scores.detach().cumsum(dim=-1) - scores.detach()
        return before <= self.threshold

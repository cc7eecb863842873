"""Top-p routing: as many experts as reach a share of a token's probability (Huang et al. 2024)."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from moecore.core.config import Misfits, Surroundings
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.routers.base import NoiseStd, Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter


class TopP(Router):
    """Choose the most probable experts, as few as reach a sum of probs above ``threshold``.

    Their probs are their weights. Certain tokens use one expert, uncertain ones several; the loss
    ``entropy`` makes tokens more certain. All ``k`` slots are computed, so fewer experts save no
    time.
    """

    kind: Literal["top_p"] = "top_p"
    threshold: float = Field(0.4, gt=0, lt=1, description="sum of probs at which experts suffice")
    k: int | None = Field(None, ge=1, description="maximum number of experts per token; null: all")
    noise_std: NoiseStd = 0.0
    balance: LossFree | None = Field(None, description="a bias on the order of experts; null: none")

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if self.k == 1:
            text = "found 1: each token then uses its first expert"
            yield ("k",), f"{text}; allowed: null, or above 1"

    def active(self, experts: int) -> float:
        """Return the maximum number of experts per token: the actual one depends on the token."""
        return self.k or experts

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TopPRouter":
        settings = NoisyTopK(k=self.k or experts, noise_std=self.noise_std, balance=self.balance)
        settings.check_k(experts)
        return TopPRouter(settings, width, experts, self.threshold)


class TopPRouter(NoisyTopKRouter):
    def __init__(self, config: NoisyTopK, width: int, experts: int, threshold: float) -> None:
        super().__init__(config, width, experts)
        self.threshold = threshold

    def valid_slots(self, scores: Tensor) -> Tensor:
        """Return which of its k best experts a token needs for the threshold, (B, T, k) bool."""
        before = scores.detach().cumsum(dim=-1) - scores.detach()
        return before <= self.threshold

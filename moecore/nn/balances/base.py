"""What every balance says of itself: it shifts what experts are chosen by, never their weights.

B images, T tokens per image, E experts, k chosen per token.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from moecore.core.config import Part


class Balance(Part, ABC):
    """The settings of a balance without a loss, a family of parts."""

    is_alone: ClassVar[bool] = True  # no balance loss and no groups of experts beside it

    @abstractmethod
    def build(self, experts: int, k: int) -> "BalanceModule":
        """Return what balances the load of so many experts, k of them a token."""

    def check_k(self, k: int, experts: int) -> None:
        """Raise UserError where k of so many experts leave nothing to balance."""

    def check_causal(self, key: str) -> None:
        """Raise UserError where a token's experts depend on other tokens of the call."""


class BalanceModule(nn.Module, ABC):
    """What a router chooses by, and what that learns of each step; its state lies in buffers."""

    @abstractmethod
    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return preferences (B, T, E), of which each token's k largest are chosen.

        logits, scores: (B, T, E), as the choice sees them, with noise where there is any.
        """

    def after_step(self, scores: Tensor, chosen: Tensor, progress: float) -> None:
        """Learn from a training step, on every rank: once, and from the tokens of all ranks.

        scores, chosen: (B, T, E) of this rank's tokens, clean; chosen is bool.  progress: share of
        the training that is done.
        """

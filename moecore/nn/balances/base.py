"""The base class of balances, which change which experts are chosen, but not their weights."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from moecore.core.config import Part


class Balance(Part, ABC):
    """Base class: settings of a method that balances the load of experts without a loss."""

    is_alone: ClassVar[bool] = True  # cannot be combined with a balance loss or groups of experts

    @abstractmethod
    def build(self, experts: int, k: int) -> "BalanceModule":
        """Return the module that balances the load of ``experts`` experts, k per token."""

    def check_k(self, k: int, experts: int) -> None:
        """Raise UserError if the balance cannot work with k of ``experts``; by default never."""

    def check_causal(self, key: str) -> None:
        """Raise UserError, at ``key``, if a token's choice depends on other tokens of the batch."""


class BalanceModule(nn.Module, ABC):
    """Shifts the scores by which a router chooses; buffers hold the state."""

    @abstractmethod
    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return preferences (B, T, E); each token's k largest are chosen."""
        # logits, scores: (B, T, E), with noise if there is any.

    def after_step(self, scores: Tensor, chosen: Tensor, progress: float) -> None:
        """Update the state by the tokens of all ranks; called once per training step on each rank.

        scores, chosen: (B, T, E) of this rank's tokens, without noise; chosen is bool.  progress:
        share of the training that is done.
        """

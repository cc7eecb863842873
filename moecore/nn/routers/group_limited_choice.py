"""A token chooses within a few groups of experts only (DeepSeek-V2 and V3).

B images, T tokens per image, E experts, k chosen per token.
"""

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.nn.routers.token_choice import top_k


class GroupLimitedChoice(Config):
    """Groups of adjacent experts; a token keeps those with the largest sums of their best scores.

    A constraint on the choice alone: experts lie nowhere, so nothing is sent less far.
    """

    number: int = Field(ge=2, description="groups of equally many experts")
    kept: int = Field(ge=1, description="groups that a token chooses within")
    per_group: int | None = Field(
        None, ge=1, description="best scores that a group is valued by; null: k / kept, at least 1"
    )

    def check_experts(self, experts: int, k: int, key: str) -> None:
        """Raise UserError where so many experts do not divide, or leave a token fewer than k."""
        size = experts // self.number
        for name, holds, allowed in (
            ("number", experts % self.number == 0, f"a divisor of experts.number, {experts}"),
            ("kept", self.kept <= self.number, f"at most {self.number}, the number of groups"),
            ("kept", k <= self.kept * size, f"so many that they hold router.k, {k} experts"),
            ("per_group", (self.per_group or 1) <= size, f"at most {size}, a group's experts"),
        ):
            if not holds:
                raise UserError(f"{key}.{name}: found {getattr(self, name)}; allowed: {allowed}")

    def limit_scores(self, scores: Tensor, k: int) -> Tensor:
        """Return scores (B, T, E) with −∞ outside each token's groups."""
        grouped = scores.unflatten(-1, (self.number, -1))
        best = top_k(grouped, self.per_group or max(1, k // self.kept))
        kept = top_k(grouped.gather(-1, best).sum(dim=-1), self.kept)
        inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        return grouped.where(inside.unsqueeze(-1), -torch.inf).flatten(-2)

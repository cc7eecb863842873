"""Some of the tokens to experts and back, where the others skip them (Mixture-of-Depths).

B images, T tokens per image, C of them that take part, in G groups, R rows, d width.
"""

from typing import NamedTuple

from torch import Tensor

from moecore.nn.dispatch import Rows, SparsePlan


class DepthPlan(NamedTuple):
    """The plan (G, C) of the tokens that take part; all others come back as 0."""

    plan: SparsePlan
    places: Tensor  # (G, C) where they are among the B·T tokens
    shape: tuple[int, int]  # B, T

    def keep_experts(self, number: int) -> "DepthPlan":
        """Return the plan of the first ``number`` experts alone, as SparsePlan does."""
        return self._replace(plan=self.plan.keep_experts(number))

    def dispatch(self, tokens: Tensor) -> Rows:
        """Tokens (B, T, d) to rows (R, d) sorted by expert."""
        return self.plan.dispatch(tokens.flatten(0, 1)[self.places])

    def combine(self, rows: Tensor) -> Tensor:
        """Rows (R, d) to tokens (B, T, d) in the rows' dtype."""
        return spread_tokens(self.plan.combine(rows), self.places, self.shape, 0)


def spread_tokens(values: Tensor, places: Tensor, shape: tuple[int, int], blank: float) -> Tensor:
    """Return (B, T, n) with values (G, C, n) at their places among the B·T, and else ``blank``."""
    whole = values.new_full((shape[0] * shape[1], values.shape[-1]), blank)
    return whole.index_copy(0, places.flatten(), values.flatten(0, 1)).unflatten(0, shape)

"""Tokens to experts where the router has projected them already onto the experts' bases.

B images, T tokens per image, N = B·T, E experts, k chosen per token, d width, r rank of a basis,
R rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moecore.nn.dispatch import Rows, SparsePlan
from moecore.nn.kernels.grouped import to_autocast


class ProjectionDispatchPlan(NamedTuple):
    """A SparsePlan whose rows are projections, which experts of the same basis reuse."""

    plan: SparsePlan
    projections: Tensor  # (N·E, r) of every token on every basis
    sources: Tensor  # (N·k,) the projection of each pair of token and choice: token·E + expert

    @classmethod
    def build(
        cls, plan: SparsePlan, projections: Tensor, chosen: Tensor
    ) -> "ProjectionDispatchPlan":
        """Return it of projections (B, T, E, r) and the chosen experts (B, T, k) of ``plan``."""
        first = torch.arange(
            0, projections[..., 0].numel(), projections.shape[2], device=chosen.device
        )
        return cls(
            plan, projections.flatten(0, 2), (first.unsqueeze(-1) + chosen.flatten(0, 1)).flatten()
        )

    def dispatch(self, tokens: Tensor) -> Rows:
        """The chosen projections (R, r) by expert; ``tokens`` are those that the router saw.

        Under autocast the rows have its dtype: a token has fewer rows than projections, so they are
        rounded after the choice.
        """
        values = _Pick.apply(self.projections, self.sources, self.plan.order, self.plan.rows)
        return Rows(to_autocast(values), self.plan.offsets, projected=True)

    def combine(self, rows: Tensor) -> Tensor:
        """Rows (R, d) to tokens (B, T, d), as SparsePlan does."""
        return self.plan.combine(rows)


class _Pick(Function):
    """projections (N·E, r) -> rows (R, r).

    Every pair has a projection of its own, so the gradient is only moved there.

    Rows of padding repeat the first pair; the gradient is read at the pairs' rows only.
    """

    @staticmethod
    def forward(projections: Tensor, sources: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        return projections.index_select(0, sources.index_select(0, order))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.number = len(inputs[0])
        ctx.save_for_backward(inputs[1], inputs[3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        sources, rows = ctx.saved_tensors
        back = grad.new_zeros(ctx.number, grad.shape[1])
        return back.index_copy_(0, sources, grad.index_select(0, rows)), None, None, None

"""Tokens to experts and back where experts chose: a token has from none to one row per expert.

B images, T tokens per image, N = B·T, E experts, M tokens taken by each expert, R = E·M rows, d
width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moecore.nn.dispatch import Rows, cast_function_output, cat_or_single
from moecore.nn.kernels.grouped import rows_at_once, to_autocast


class ExpertChoicePlan(NamedTuple):
    """All experts compute equally many rows; tokens come back as the weighted sum of theirs.

    Going back to the tokens (``combine``, and the gradient of ``dispatch``) adds expert after
    expert: an expert holds a token at most once, so no two rows of one ``index_add_`` meet, and the
    sum has a fixed order on every device. Gathering each token's rows through a padded (N, E) table
    is deterministic too, but reads N·E rows instead of R: 4 times as long on CPU.
    """

    order: Tensor  # (E, M) the token of each row, each at most once per expert
    weights: Tensor  # (E, M) of the experts' outputs
    shape: tuple[int, int]  # (B, T)

    def dispatch(self, tokens: Tensor) -> Rows:
        """Tokens (B, T, d) to rows (R, d) sorted by expert, in autocast's dtype."""
        experts, taken = self.order.shape
        offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=tokens.device) * taken
        return Rows(_GatherTaken.apply(to_autocast(tokens).flatten(0, 1), self.order), offsets)

    def combine(self, rows: Tensor) -> Tensor:
        """Rows (R, d) to tokens (B, T, d), summed in fp32; 0 for a token that nobody took."""
        tokens = _WeightedSumOfTaken.apply(
            rows, self.weights, self.order, self.shape[0] * self.shape[1]
        )
        return tokens.view(*self.shape, rows.shape[-1])


def _sum_rows(rows: Tensor, weights: Tensor | None, order: Tensor, tokens: int) -> Tensor:
    """Each token's sum (N, d) of its rows (R, d), times ``weights`` (E, M) where given."""
    dtype = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)
    total = rows.new_zeros(tokens, rows.shape[-1], dtype=dtype)
    for expert, part in enumerate(rows.view(*order.shape, rows.shape[-1])):
        if weights is None:
            part = part.to(dtype)
        else:
            part = part * weights[expert].unsqueeze(-1)
        total.index_add_(0, order[expert], part)
    return cast_function_output(total, rows.dtype)


class _GatherTaken(Function):
    """tokens (N, d) -> rows (R, d); the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(tokens: Tensor, order: Tensor) -> Tensor:
        return tokens.index_select(0, order.flatten())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.tokens = len(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return _sum_rows(grad.contiguous(), None, ctx.saved_tensors[0], ctx.tokens), None


class _WeightedSumOfTaken(Function):
    """rows (R, d), weights (E, M) -> tokens (N, d)."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, order: Tensor, tokens: int) -> Tensor:
        return _sum_rows(rows.contiguous(), weights, order, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        rows, weights, order = ctx.saved_tensors
        chunk = rows_at_once(rows)
        scaled = []
        products = []
        for part, scale, tokens in zip(
            rows.split(chunk),
            weights.flatten().split(chunk),
            order.flatten().split(chunk),
            strict=True,
        ):
            gathered = grad.index_select(0, tokens).to(weights.dtype)
            scaled.append((gathered * scale.unsqueeze(-1)).to(rows.dtype))
            products.append((gathered * part).sum(dim=-1))
        return cat_or_single(scaled), cat_or_single(products).view_as(weights), None, None

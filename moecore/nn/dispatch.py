"""Dispatch tokens to experts and combine their outputs.

N = B·T, R rows (one per pair of token and choice, plus padding), rank r of a basis. Both directions
of autograd only gather, which is fast and deterministic. Products of rows with weights use the
weights' dtype.
"""

from functools import reduce
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import Function

from moecore.nn.kernels.grouped import rows_at_once, to_autocast


class RowOrigins(NamedTuple):
    order: Tensor  # (R,), index of each row among the pairs (token, choice) of ``shape``
    shape: tuple[int, ...]  # (B, T, k)


class Rows(NamedTuple):
    """The input of experts: the tokens that go to each, sorted by expert."""

    values: Tensor  # (R, d)
    offsets: Tensor  # (E,) int32, the end of each expert's rows
    projected: bool = False  # values (R, r) are already projected onto their expert's basis
    pairs: RowOrigins | None = None  # None: rows are not pairs of token and choice
    # (G, E): rows are sorted by group instead, with offsets (G,). The module then has parameters
    # (G, …), already the means over all experts weighted by shares: read G from their shapes.
    shares: Tensor | None = None


def single_expert_rows(tokens: Tensor) -> Rows:
    """Return tokens (B, T, d) as the rows (B·T, d) of a single expert."""
    values = to_autocast(tokens).flatten(0, 1)
    ends = torch.full((1,), len(values), dtype=torch.int32, device=values.device)
    order = torch.arange(len(values), device=values.device)
    return Rows(values, ends, pairs=RowOrigins(order, (*tokens.shape[:2], 1)))


# Pairs over capacity keep a row with weight 0. The expert computes it, but it is not used. So on a
# GPU the number of rows does not depend on the data: the host never waits, and grouped_mm leaves no
# rows uninitialised. On a CPU every expert's rows are padded (see ``round_row_counts``) with the
# first token; padding is computed, but not used.
class SparsePlan(NamedTuple):
    """A plan in which each token goes to k experts and gets the weighted sum of their outputs."""

    is_per_token = True  # a token's output depends on this token only

    order: Tensor  # (R,) the pair token·k + choice of each row; 0 for padding
    tokens: Tensor  # (R,) the token of each row
    rows: Tensor  # (N·k,) the row of each pair
    offsets: Tensor  # (E,) int32, where each expert's rows end
    weights: Tensor  # (B, T, k) combine weights; 0 = not processed
    computed: Tensor | int | None = None  # number of pairs that experts compute; None: all

    @classmethod
    def build(cls, experts: Tensor, weights: Tensor, processed: Tensor | None, number: int) -> Self:
        """Return the plan for expert ids (B, T, k) < ``number``; weights 0 if not ``processed``."""
        # processed: (B, T, k) bool, pairs within capacity; None for all.
        # stable: within an expert tokens keep their order, so sums do not depend on the sort
        keys = experts.flatten()
        if keys.is_cuda and number <= 2**15:  # CUDA's sort takes one pass per byte
            keys = keys.to(torch.uint8 if number <= 2**8 else torch.int16)
        by_expert, pairs = torch.sort(keys, stable=True)
        numbers = torch.arange(number, dtype=by_expert.dtype, device=experts.device)
        ends = torch.searchsorted(by_expert, numbers, right=True)
        places = torch.arange(len(pairs), device=experts.device)
        order, offsets = pairs, ends
        if places.is_cpu and not torch.compiler.is_compiling():
            offsets = round_row_counts(ends.diff(prepend=ends.new_zeros(1))).cumsum(0)
            # padding of earlier experts shifts an expert's rows
            shifts = torch.cat([ends.new_zeros(1), (offsets - ends)[:-1]])
            places = places + shifts.index_select(0, by_expert)
            order = pairs.new_zeros(int(offsets[-1])).scatter_(0, places, pairs)
        rows = torch.empty_like(pairs).scatter_(0, pairs, places)
        if processed is not None:
            weights = torch.where(processed, weights, 0)
        k = weights.shape[-1]
        return cls(order, order // k if k > 1 else order, rows, offsets.int(), weights)

    @classmethod
    def to_all(cls, weights: Tensor) -> Self:
        """Return the plan that sends every token to all experts, with weights (B, T, E)."""
        experts = torch.arange(weights.shape[-1], device=weights.device).expand(weights.shape)
        return cls.build(experts, weights, None, weights.shape[-1])

    def keep_experts(self, number: int) -> "SparsePlan":
        """Return the plan of the first ``number`` experts; outputs of others count as 0."""
        # On a CPU the rows of other experts are dropped, except one that represents all of them. On
        # a GPU, where the number of rows must not depend on the data, the last expert computes
        # them, unused. On the meta device every expert counts as chosen equally often.
        last = self.offsets[number - 1]
        is_kept = self.rows < last
        rows = len(self.order)
        computed = is_kept.sum()
        if self.order.is_meta:
            rows = computed = -(-rows * number // len(self.offsets))
        elif self.order.is_cpu and not torch.compiler.is_compiling():
            rows = min(rows, int(last) + 1)
        return SparsePlan(
            self.order[:rows],
            self.tokens[:rows],
            self.rows.clamp(max=rows - 1),
            torch.cat([self.offsets[: number - 1], torch.full_like(self.offsets[:1], rows)]),
            self.weights.where(is_kept.view_as(self.weights), 0),
            computed,
        )

    def dispatch(self, tokens: Tensor) -> Rows:
        """Return tokens (B, T, d) as rows (R, d) sorted by expert, then by token."""
        flat = to_autocast(tokens).flatten(0, 1)  # rounding N tokens is cheaper than R rows
        values = GatherTokens.apply(flat, self.tokens, self.rows, self.weights.shape[-1])
        return Rows(values, self.offsets, pairs=RowOrigins(self.order, tuple(self.weights.shape)))

    def combine(self, rows: Tensor) -> Tensor:
        """Return each token's weighted sum of its rows (R, d): (B, T, d), added up in fp32."""
        tokens = _WeightedSum.apply(rows, self.weights.flatten(0, 1), self.tokens, self.rows)
        return tokens.view(*self.weights.shape[:2], rows.shape[-1])

    def outputs_by_choice(self, rows: Tensor) -> Tensor:
        """Return the unweighted outputs (B, T, k, d) of each token's choices, from rows (R, d)."""
        return rows.index_select(0, self.rows).view(*self.weights.shape, rows.shape[-1])


class TokensAndPlan(NamedTuple):
    """The input of experts that gather tokens and sum outputs themselves (``ChosenKernels``)."""

    tokens: Tensor  # (B, T, d)
    plan: SparsePlan


def round_row_counts(sizes: Tensor) -> Tensor:
    """Round row counts (int64) up on a CPU, so that kernels see few different shapes."""
    # oneDNN compiles a kernel for every new number of rows (0.6 to 0.9 ms; the product itself takes
    # 0.03 to 0.1 ms in a small model), and routing brings new numbers in every step: with 32
    # experts a training step took 2.6 times as long without rounding. There are four counts per
    # octave, up to multiples of 64, and of 128 from 4,096 rows on.
    step = 2.0 ** (sizes.clamp(min=1).double().log2().floor() - 2)
    step = step.clamp(1, 64).where(sizes < 4096, 128).to(sizes.dtype)
    return (sizes + step - 1).div(step, rounding_mode="floor").mul(step)


class GatherTokens(Function):
    """Gather tokens (N, d) as rows (R, d); a token's gradient is the sum over its k ``rows``."""

    @staticmethod
    def forward(tokens: Tensor, sources: Tensor, rows: Tensor, k: int) -> Tensor:
        return tokens.index_select(0, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, _, rows, ctx.k = inputs
        ctx.save_for_backward(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        (rows,) = ctx.saved_tensors
        parts = (grad.index_select(0, rows[choice :: ctx.k]) for choice in range(ctx.k))
        return reduce(torch.add, parts), None, None, None


class _WeightedSum(Function):
    """Sum rows (R, d), weighted by (N, k), to tokens (N, d)."""

    @staticmethod
    def forward(values: Tensor, weights: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
        k = weights.shape[1]
        total = values.index_select(0, rows[::k]) * weights[:, :1]
        for choice in range(1, k):
            total.addcmul_(values.index_select(0, rows[choice::k]), weights[:, choice : choice + 1])
        return cast_function_output(total, values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        values, weights, sources, rows = ctx.saved_tensors
        by_row = weights.new_zeros(len(sources)).scatter_(0, rows, weights.flatten()).unsqueeze(-1)
        to_values, to_weights = weighted_sum_gradients(grads[0], values, by_row, sources)
        return to_values, to_weights.index_select(0, rows).view_as(weights), None, None


def weighted_sum_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, sources: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows (R, d) and of their weights (R,), given the sum's gradient."""
    # grad: (N, d), of the sums. weights: (R, 1). sources: (R,), the token whose sum has the row.
    chunk = rows_at_once(rows)
    to_rows = []
    to_weights = []
    parts = (values.split(chunk) for values in (rows, weights, sources))
    for part, scale, tokens in zip(*parts, strict=True):
        gathered = grad.index_select(0, tokens).to(weights.dtype)
        to_rows.append((gathered * scale).to(rows.dtype))
        to_weights.append((gathered * part).sum(dim=-1))
    return _cat_or_single(to_rows), _cat_or_single(to_weights)


def _cat_or_single(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def cast_function_output(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums in ``dtype``, copied in torch.compile, where an alias would get gradient 0."""
    if sums.dtype != dtype:
        return sums.to(dtype)
    if torch.compiler.is_compiling():
        # torch 2.11 gives a gradient of 0 where the output was added to in place, or where ``to``
        # returns its input.
        return sums.clone()
    return sums


class BasisProjectionPlan(NamedTuple):
    """A SparsePlan whose rows are tokens that the router projected on their experts' bases."""

    is_per_token = True

    plan: SparsePlan
    projections: Tensor  # (N·E, r) of every token on every basis
    sources: Tensor  # (N·k,) the projection of each pair of token and choice: token·E + expert

    @classmethod
    def build(cls, plan: SparsePlan, projections: Tensor, chosen: Tensor) -> Self:
        """Return the plan for projections (B, T, E, r) and chosen experts (B, T, k)."""
        flat = projections.flatten(0, 2)
        first = torch.arange(0, len(flat), projections.shape[2], device=chosen.device)
        return cls(plan, flat, (first.unsqueeze(-1) + chosen.flatten(0, 1)).flatten())

    def dispatch(self, tokens: Tensor) -> Rows:
        """Return chosen projections as rows (R, r) sorted by expert; ``tokens`` are not read."""
        values = _GatherProj.apply(self.projections, self.sources, self.plan.order, self.plan.rows)
        # cast after the choice: a token has fewer rows than projections
        return Rows(to_autocast(values), self.plan.offsets, projected=True)

    def combine(self, rows: Tensor) -> Tensor:
        return self.plan.combine(rows)


class _GatherProj(Function):
    """Gather the projections (N·E, r) of chosen experts as rows (R, r)."""

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
        # Each pair has its own projection, so gradients are moved, not added. Rows of padding
        # repeat the first pair and are not read.
        back = grad.new_zeros(ctx.number, grad.shape[1])
        return back.index_copy_(0, sources, grad.index_select(0, rows)), None, None, None

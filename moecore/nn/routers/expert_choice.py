"""Expert Choice (Zhou et al. 2022), a baseline of TGR-MoE: experts choose tokens.

N = B·T tokens in G groups of S. An expert takes C tokens per group, M in total; R = E·M rows.
"""

from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd import Function

from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.core.streams import normal_like
from moecore.nn.dispatch import Rows, cast_function_output, weighted_sum_gradients
from moecore.nn.kernels.grouped import full_precision, to_autocast
from moecore.nn.routers import base, token_choice


class ExpertChoice(base.Router):
    """Let each expert take the tokens with its largest gates, a softmax over a linear map."""

    chooses_per_token: ClassVar[bool] = False
    looks_ahead: ClassVar[str | None] = "whose experts choose among all words"

    kind: Literal["expert_choice"] = "expert_choice"
    k: int = Field(2, ge=1, description="mean number of experts per token, at capacity_factor 1")
    capacity_factor: float = Field(1.0, gt=0, description="tokens per expert / (tokens·k/experts)")
    noise_std: base.NoiseStd = 1.0
    group_size: int = Field(1, ge=1, description="images per choice of an expert, in training")

    def active(self, experts: int) -> float:
        return min(float(experts), self.k * self.capacity_factor)

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "ExpertChoiceRouter":
        self.check_k(experts)
        return ExpertChoiceRouter(self, width, experts)


# In evaluation each image is a group, so that predictions do not depend on the batch.
class ExpertChoiceRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (ExpertChoicePlan, RoutingRecord)."""

    batch_views = 1  # see ``Dropout``

    def __init__(self, config: ExpertChoice, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        self.share = config.k * base.exact_fraction(config.capacity_factor)
        # like the other linear maps of the ViT
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))

    @property
    def images_coupled_in_training(self) -> int:
        return self.config.group_size

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> "tuple[ExpertChoicePlan, RoutingRecord]":
        with full_precision(tokens):
            return self.decide(token_choice.router_logits(tokens, self.weight))

    def decide(self, logits: Tensor) -> "tuple[ExpertChoicePlan, RoutingRecord]":
        """Return plan and record for logits (B, T, E)."""
        noisy = logits
        if self.training and self.config.noise_std:
            std = self.config.noise_std / logits.shape[-1]
            noisy = logits + normal_like(logits, self.batch_views) * std
        gates = torch.softmax(noisy, dim=-1)
        group_size = self.config.group_size if self.training else 1
        order = top_tokens_per_expert(gates.detach(), self.share, group_size)
        by_expert = gates.flatten(0, 1).t()
        nothing = torch.zeros_like(by_expert, dtype=torch.bool)
        chosen = nothing.scatter(1, order, True).t().view(gates.shape)
        plan = ExpertChoicePlan(order, by_expert.gather(1, order), (gates.shape[0], gates.shape[1]))
        probs = torch.softmax(logits, dim=-1)
        combine = torch.where(chosen, gates, 0)
        return plan, RoutingRecord(logits, probs, chosen.to(gates.dtype), chosen, combine)


def top_tokens_per_expert(gates: Tensor, share: Fraction, group_size: int) -> Tensor:
    """Return each expert's C = ⌈share · S / E⌉ top tokens in each group of S tokens, (E, G·C)."""
    # gates: (B, T, E). share: mean experts per token. group_size: images per group; remaining
    # images form a smaller group. Returns indices (E, G·C) of the B·T tokens, ascending.
    chosen = []
    first = 0
    for groups in base.group_images(gates, group_size):
        number, size, experts = groups.shape
        capacity = min(size, base.ceil_tokens_per_expert(size, share, experts))
        by_expert = groups.transpose(1, 2).contiguous()
        ranked = by_expert.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[..., :capacity].sort(dim=-1).values
        starts = first + torch.arange(number, device=gates.device).view(-1, 1, 1) * size
        chosen.append((best + starts).transpose(0, 1).flatten(1))
        first += number * size
    return torch.cat(chosen, dim=1)


# Returning to tokens (``combine``, and the gradient of ``dispatch``) adds expert after expert. An
# expert has a token at most once, so no two rows of an ``index_add_`` collide, and the sum has a
# fixed order on every device. Gathering each token's rows through a padded (N, E) table is
# deterministic too, but reads N·E rows instead of R: 4 times as long on CPU.
class ExpertChoicePlan(NamedTuple):
    """A plan in which all experts compute equally many rows; a token sums its weighted rows."""

    order: Tensor  # (E, M) the token of each row, each at most once per expert
    weights: Tensor  # (E, M) weights of the experts' outputs
    shape: tuple[int, int]  # (B, T)

    def dispatch(self, tokens: Tensor) -> Rows:
        """Return tokens (B, T, d) as rows (R, d) sorted by expert, in autocast's dtype."""
        experts, number = self.order.shape
        offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=tokens.device) * number
        return Rows(_GatherTaken.apply(to_autocast(tokens).flatten(0, 1), self.order), offsets)

    def combine(self, rows: Tensor) -> Tensor:
        """Return rows (R, d) as tokens (B, T, d), summed in fp32; 0 for tokens without expert."""
        number = self.shape[0] * self.shape[1]
        tokens = _WeightedSumOfTaken.apply(rows, self.weights, self.order, number)
        return tokens.view(*self.shape, rows.shape[-1])


def _sum_per_token(rows: Tensor, weights: Tensor | None, order: Tensor, tokens: int) -> Tensor:
    """Sum rows (E·M, d), × ``weights`` if any, of tokens ``order`` (E, M), per token: (N, d)."""
    dtype = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)
    total = rows.new_zeros(tokens, rows.shape[-1], dtype=dtype)
    for expert, part in enumerate(rows.view(*order.shape, rows.shape[-1])):
        part = part.to(dtype) if weights is None else part * weights[expert].unsqueeze(-1)
        total.index_add_(0, order[expert], part)
    return cast_function_output(total, rows.dtype)


class _GatherTaken(Function):
    """Gather tokens (N, d) as rows (R, d); a token's gradient is the sum over its rows."""

    @staticmethod
    def forward(tokens: Tensor, order: Tensor) -> Tensor:
        return tokens.index_select(0, order.flatten())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.tokens = len(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_per_token(grads[0].contiguous(), None, ctx.saved_tensors[0], ctx.tokens), None


class _WeightedSumOfTaken(Function):
    """Autograd of ``_sum_per_token``: experts' rows (E·M, d) of taken tokens → (N, d), weighted."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, order: Tensor, tokens: int) -> Tensor:
        return _sum_per_token(rows.contiguous(), weights, order, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order = ctx.saved_tensors
        by_row = weights.flatten().unsqueeze(-1)
        to_rows, to_weights = weighted_sum_gradients(grads[0], rows, by_row, order.flatten())
        return to_rows, to_weights.view_as(weights), None, None

"""SoftMoE (Puigcerver et al. 2023), a baseline of TGR-MoE: experts compute mixtures of tokens."""

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.dispatch import Rows
from moecore.nn.kernels.grouped import full_precision, to_autocast
from moecore.nn.routers.base import Router

# added under the root of a norm, so that a token of zeros has a finite gradient
EPSILON = 1e-6


class SoftSlots(Router):
    """Mix an image's tokens into slots, and the slots' outputs into each token's output.

    Both are weighted means. The papers give each expert p = round(T · capacity factor / E) slots:
    49 for the T = 197 tokens of ViT-S/16 on 224 pixels, E = 8 and a factor of 2.
    """

    chooses_per_token: ClassVar[bool] = False
    looks_ahead: ClassVar[str | None] = "whose slots are means of all words"

    kind: Literal["soft_slots"] = "soft_slots"
    slots: int = Field(1, ge=1, le=2**16, description="slots per expert: round(tokens·k / experts)")

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "SoftSlotsRouter":
        return SoftSlotsRouter(self, width, experts)


class SlotsPlan(NamedTuple):
    """Weighted sums from tokens to slots, p per expert, and back, within each image."""

    uses_all_experts = True  # every expert contributes to every token

    mixing: Tensor  # (B, T, E, p), sum to 1 over an image's tokens
    weights: Tensor  # (B, T, E, p), sum to 1 over all slots

    def dispatch(self, tokens: Tensor) -> Rows:
        """Return tokens (B, T, d) as rows (R, d): each expert's slots, image by image."""
        values = to_autocast(tokens)
        experts = self.mixing.shape[2]
        slots = torch.einsum("btep,btd->ebpd", self.mixing.to(values.dtype), values).flatten(0, 2)
        numbers = torch.arange(1, experts + 1, dtype=torch.int32, device=tokens.device)
        return Rows(slots, numbers * (len(slots) // experts))

    def combine(self, rows: Tensor) -> Tensor:
        batch, _, experts, slots = self.weights.shape
        values = rows.view(experts, batch, slots, rows.shape[-1])
        return torch.einsum("btep,ebpd->btd", self.weights.to(rows.dtype), values)


# In the record, an expert's logit is the logsumexp of its slots' scores, so that ``probs``, their
# softmax, is the sum of its slots' combine weights. Nothing is random and no token is dropped:
# ``chosen`` and ``load`` are 1 everywhere.
class SoftSlotsRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SlotsPlan, RoutingRecord)."""

    def __init__(self, config: SoftSlots, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        slots = torch.empty(width, experts, config.slots)
        self.slots = nn.Parameter(nn.init.normal_(slots, std=width**-0.5))
        self.scale = nn.Parameter(torch.ones(1))  # not a scalar: sharded models have none
        self.register_load_state_dict_pre_hook(_reshape_loaded_scale)

    def forward(
        self, tokens: Tensor, context: RoutingContext = NO_CONTEXT
    ) -> tuple[SlotsPlan, RoutingRecord]:
        with full_precision(tokens):
            dtype = torch.promote_types(self.slots.dtype, torch.float32)
            directions = unit_vectors(self.slots.to(dtype), dim=0) * self.scale
            units = unit_vectors(tokens.to(dtype), dim=-1)
            return self.decide(torch.einsum("btd,dep->btep", units, directions))

    def decide(self, scores: Tensor) -> tuple[SlotsPlan, RoutingRecord]:
        """Return plan and record for scores (B, T, E, p) of tokens and slots."""
        mixing = torch.softmax(scores, dim=1)
        plan = SlotsPlan(mixing, torch.softmax(scores.flatten(2), dim=-1).view_as(scores))
        logits = torch.logsumexp(scores, dim=-1)
        probs = torch.softmax(logits, dim=-1)
        ones = torch.ones_like(logits)
        return plan, RoutingRecord(logits, probs, load=ones, chosen=ones.bool(), combine=probs)


def _reshape_loaded_scale(layer: object, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Reshape ``scale`` in ``state`` to (1,), before loading: older files store a scalar."""
    name = f"{prefix}scale"
    if name in state:
        state[name] = state[name].reshape(1)


def unit_vectors(vectors: Tensor, *, dim: int) -> Tensor:
    """Return v / sqrt(|v|² + 1e-6) along ``dim``; zeros stay zeros, with a finite gradient."""
    return vectors * torch.rsqrt(vectors.square().sum(dim=dim, keepdim=True) + EPSILON)

"""Experts that are MLPs, like the feed-forward block of a ViT."""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError
from moecore.core.streams import draw_bernoulli_mask
from moecore.nn.dispatch import Rows, TokensAndPlan
from moecore.nn.experts.base import Experts, ExpertsModule, ZeroComputation, ZeroComputationExperts
from moecore.nn.kernels.grouped import ChosenKernels, grouped_linear, grouped_mlp
from moecore.nn.layers.block import ACTIVATIONS


class Mlp(Experts):
    """Linear(d, h), an activation, Linear(h, d) per expert, with biases; or SwiGLU without biases.

    ``shared`` experts see every token with weight 1 (DeepSeekMoE), in addition to the ``number`` of
    experts. If ``fine`` splits experts into pieces, ``shared`` of these pieces are shared and none
    is added, so that parameters and FLOPs stay equal.
    """

    has_hidden_units: ClassVar[bool] = True
    start_settings: ClassVar[tuple[str, ...]] = ("init",)

    kind: Literal["mlp"] = "mlp"
    number: int = Field(8, ge=2, le=2**16, description="number of experts")
    hidden_ratio: float = Field(4.0, gt=0, le=1000, description="hidden width / width of a token")
    init: Literal["independent", "identical", "flat"] = Field(
        "independent",
        description="independent or identical (V-MoE) initial experts, drawn as timm's ViT; flat: "
        "independent, uniform within ±1 / √(d·h), as in SMoE language models",
    )
    activation: Literal["gelu", "relu", "quick_gelu", "linear", "swiglu"] = Field(
        "gelu",
        description="quick_gelu: x·σ(1.702 x), of OpenAI's CLIP; linear: none; swiglu: two maps to "
        "h numbers, silu of one times the other, no biases; its three matrices have the same size "
        "at 2/3 of the ratio",
    )
    shared: int = Field(0, ge=0, description="additional experts of every token; fewer than routed")
    fine: int | None = Field(
        None,
        ge=1,
        description="pieces of equal hidden width per expert: a token uses k · fine pieces, of "
        "which `shared` are the same for every token; null: experts are not split, and shared "
        "ones are added",
    )
    zero_computation: ZeroComputation | None = Field(
        None, description="experts without a network, additional choices (MoE++); null: none"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of hidden values zeroed in training")

    @model_validator(mode="after")
    def _two_routed_or_more(self) -> "Mlp":
        limit = self.number - 1 if self.fine is None else self.number * self.fine - 2
        if self.shared > limit:
            raise ValueError(f"shared: found {self.shared}; allowed: 0 to {limit}")
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        if self.fine == 1 and not self.shared:
            text = "found 1, which does not split experts"
            yield ("fine",), f"{text}; allowed: null, or above 1"

    @property
    def provides(self) -> frozenset[str]:  # pyrefly: ignore[bad-override]
        return frozenset({"zero_computation"} if self.zero_computation else ())

    @property
    def networks(self) -> int:
        """Return the number of networks that a router chooses among: pieces that are not shared."""
        if self.fine is None:
            return self.number
        return self.number * self.fine - self.shared

    @property
    def choices(self) -> int:
        return self.networks + (self.zero_computation.number if self.zero_computation else 0)

    def scale_k(self, k: int) -> int:
        return k if self.fine is None else k * self.fine - self.shared

    def build(self, width: int) -> "MlpExperts":
        return MlpExperts(self, width)

    def build_shared(self, width: int) -> "MlpExperts | None":
        """Return all shared experts as one with their total hidden width; None without any."""
        if not self.shared:
            return None
        ratio = self.hidden_ratio * self.shared / (self.fine or 1)
        single = {"number": 1, "hidden_ratio": ratio, "fine": None}
        return MlpExperts(self.model_copy(update=single), width)

    def build_zero_computation(self, width: int) -> ZeroComputationExperts | None:
        zero = self.zero_computation
        if zero is None:
            return None
        return ZeroComputationExperts(zero, width)


class MlpExperts(ExpertsModule):
    """``experts(rows)`` with Rows of values (R, d) returns values (R, d).

    With TokensAndPlan it returns weighted outputs (B, T, d), computed by ``ChosenKernels``.
    """

    batch_views = 1  # see ``Dropout``
    can_copy_mlp = True

    def __init__(self, config: Mlp, width: int) -> None:
        super().__init__()
        hidden = max(1, round(config.hidden_ratio * width))
        pieces = config.fine or 1
        if hidden % pieces:
            raise UserError.at("experts.fine", found=pieces, allowed=f"a divisor of width {hidden}")
        hidden //= pieces
        self.activation = config.activation
        self.dropout = config.dropout
        self.up, self.up_bias = _draw_maps(config, width, hidden, 1 + (self.activation == "swiglu"))
        self.down, self.down_bias = _draw_maps(config, hidden, width)

    @property
    def can_fuse(self) -> bool:
        is_covered = self.activation in ("gelu", "swiglu") and not (self.dropout and self.training)
        return is_covered and type(self) is MlpExperts  # a subclass may compute something else

    def forward(self, rows: Rows | TokensAndPlan) -> Tensor:
        if isinstance(rows, TokensAndPlan):
            assert ChosenKernels.compute is not None  # checked by the layer
            return ChosenKernels.compute(self, *rows)
        if self.activation == "gelu" and not self.dropout:
            assert self.up_bias is not None and self.down_bias is not None  # only SwiGLU has none
            maps = (self.up, self.up_bias, self.down, self.down_bias)
            return grouped_mlp(rows.values, *maps, rows.offsets)
        active = EXPERT_ACTIVATIONS[self.activation]
        hidden = active(grouped_linear(rows.values, self.up, self.up_bias, rows.offsets))
        if self.training and self.dropout:  # drawn per pair for the whole batch
            assert rows.pairs is not None  # MoESettings.build refuses dropout with other routers
            share, size = 1 - self.dropout, (*rows.pairs.shape, hidden.shape[1])
            mask = draw_bernoulli_mask(hidden.new_empty(size), share, self.batch_views)
            hidden = hidden * (mask.flatten(0, 2).index_select(0, rows.pairs.order) / share)
        return grouped_linear(hidden, self.down, self.down_bias, rows.offsets)


def gate_with_silu(hidden: Tensor) -> Tensor:
    """Return silu of the first half of (R, 2h) times the second half, (R, h) (Shazeer 2020)."""
    gate, value = hidden.chunk(2, dim=-1)
    return silu(gate) * value


EXPERT_ACTIVATIONS = ACTIVATIONS | {"relu": relu, "swiglu": gate_with_silu}


def _draw_maps(
    config: Mlp, inputs: int, outputs: int, maps: int = 1
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weights (E, inputs, maps · outputs) by ``init``, and zero biases or None (SwiGLU)."""
    number = config.networks
    bias = None
    if config.activation != "swiglu":
        bias = nn.Parameter(torch.zeros(number, outputs))
    if config.init == "flat":
        bound = (inputs * outputs) ** -0.5
        weights = torch.empty(number, inputs, maps * outputs)
        return nn.Parameter(nn.init.uniform_(weights, -bound, bound)), bias
    distinct = number if config.init == "independent" else 1
    weight = nn.init.trunc_normal_(torch.empty(distinct, inputs, maps * outputs), std=0.02)
    return nn.Parameter(weight.expand(number, -1, -1).contiguous()), bias

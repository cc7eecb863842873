"""Experts that are the feed-forward block of a ViT."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from moecore.core.streams import bernoulli_like
from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.nn.kernels.grouped import grouped_linear, grouped_mlp
from moecore.nn.layers.block import keep_linear, quick_gelu

ACTIVATIONS = {"gelu": gelu, "relu": relu, "quick_gelu": quick_gelu, "linear": keep_linear}


class Mlp(Experts):
    """Each expert is Linear(d, h), an activation, Linear(h, d), with biases."""

    kind: Literal["mlp"] = "mlp"
    number: int = Field(8, ge=2, le=2**16, description="experts")
    hidden_ratio: float = Field(
        4.0, gt=0, le=1000, description="hidden width of an expert over the token's"
    )
    init: Literal["independent", "identical", "flat"] = Field(
        "independent",
        description="experts start apart, or all the same (as V-MoE), with timm's weights of a "
        "ViT; flat: apart, uniform within 1 / √(d·h), as SMoE language models start",
    )
    activation: Literal["gelu", "relu", "quick_gelu", "linear"] = Field(
        "gelu", description="quick_gelu: x·σ(1.702 x), of OpenAI's CLIP; linear: none"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="in training: share of hidden numbers that are 0"
    )

    def build(self, width: int) -> "MlpExperts":
        """The experts of ``width``-wide tokens."""
        return MlpExperts(self, width)


class MlpExperts(ExpertsModule):
    """``experts(rows)`` with Rows of values (R, d) returns values (R, d)."""

    def __init__(self, config: Mlp, width: int) -> None:
        super().__init__()
        hidden = max(1, round(config.hidden_ratio * width))
        self.activation = config.activation
        self.dropout = config.dropout
        self.up, self.up_bias = _linears(config, width, hidden)
        self.down, self.down_bias = _linears(config, hidden, width)

    def forward(self, rows: Rows) -> Tensor:
        maps = (self.up, self.up_bias, self.down, self.down_bias)
        if self.activation == "gelu" and not self.dropout:
            return grouped_mlp(rows.values, *maps, rows.offsets)
        hidden = ACTIVATIONS[self.activation](
            grouped_linear(rows.values, self.up, self.up_bias, rows.offsets)
        )
        hidden = self._drop_hidden(hidden, rows)
        return grouped_linear(hidden, self.down, self.down_bias, rows.offsets)

    def _drop_hidden(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Hidden values (R, h) after dropout, which is drawn for the whole batch, pair by pair."""
        rate = self.dropout
        if not self.training or not rate:
            return hidden
        assert rows.pairs is not None  # MoESettings.build refuses dropout with other routers
        kept = bernoulli_like(hidden.new_empty(*rows.pairs.shape, hidden.shape[1]), 1 - rate)
        return hidden * (kept.flatten(0, 2).index_select(0, rows.pairs.order) / (1 - rate))


def _linears(config: Mlp, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weights (E, inputs, outputs), truncated normal or uniform (``init``), and zero biases."""
    if config.init == "flat":
        bound = (inputs * outputs) ** -0.5
        weights = nn.init.uniform_(torch.empty(config.number, inputs, outputs), -bound, bound)
        return nn.Parameter(weights), nn.Parameter(torch.zeros(config.number, outputs))
    drawn = config.number if config.init == "independent" else 1
    weight = nn.init.trunc_normal_(torch.empty(drawn, inputs, outputs), std=0.02)
    weights = nn.Parameter(weight.expand(config.number, -1, -1).contiguous())
    return weights, nn.Parameter(torch.zeros(config.number, outputs))

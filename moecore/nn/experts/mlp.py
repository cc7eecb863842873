"""Experts that are the feed-forward block of a ViT."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import ExpertsConfig, ExpertsModule
from moecore.nn.grouped import grouped_mlp


class Mlp(ExpertsConfig):
    """Each expert is Linear(d, h), GELU, Linear(h, d), with biases."""

    kind: Literal["mlp"] = "mlp"
    number: int = Field(default=8, ge=2, description="experts")
    hidden_ratio: float = Field(
        default=4.0, gt=0, description="hidden width h of one expert over the token width d"
    )
    init: Literal["independent", "identical"] = Field(
        default="independent", description="experts start apart, or all the same (as V-MoE)"
    )

    def build(self, width: int) -> "MlpExperts":
        """The experts of ``width``-wide tokens."""
        return MlpExperts(self, width)


class MlpExperts(ExpertsModule):
    """``experts(rows)`` with Rows of values (R, d) returns values (R, d)."""

    def __init__(self, config: Mlp, width: int) -> None:
        super().__init__()
        hidden = max(1, round(config.hidden_ratio * width))
        self.up, self.up_bias = _linears(config, width, hidden)
        self.down, self.down_bias = _linears(config, hidden, width)

    def forward(self, rows: Rows) -> Tensor:
        return grouped_mlp(
            rows.values, self.up, self.up_bias, self.down, self.down_bias, rows.offsets
        )


def _linears(config: Mlp, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weights (E, inputs, outputs), truncated normal with std 0.02, and zero biases (E, outputs):
    timm's start of a ViT.
    """
    drawn = config.number if config.init == "independent" else 1
    weight = nn.init.trunc_normal_(torch.empty(drawn, inputs, outputs), std=0.02)
    weights = nn.Parameter(weight.expand(config.number, -1, -1).contiguous())
    return weights, nn.Parameter(torch.zeros(config.number, outputs))

"""Experts without a network, which cost almost nothing: MoE++'s (Jin et al. 2024, 2410.07348).

B images, T tokens per image, d width, C constants, Z experts without a network.
"""

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.core.config import Config
from moecore.nn.kernels.grouped import full_precision


class ZeroComputation(Config):
    """How many experts without a network a router chooses among, behind those with one."""

    constants: int = Field(
        1, ge=0, le=2**16, description="experts that give a learned mean of the token and a vector"
    )
    copies: int = Field(1, ge=0, le=2**16, description="experts that give the token as it is")
    zeros: int = Field(1, ge=0, le=2**16, description="experts that give 0: the token skips")

    @model_validator(mode="after")
    def _some(self) -> "ZeroComputation":
        if not self.number:
            raise ValueError("found no expert; allowed: at least one, or null in the place of all")
        return self

    @property
    def number(self) -> int:
        """Return how many there are, Z."""
        return self.constants + self.copies + self.zeros

    def build(self, width: int) -> "ZeroComputationExperts":
        """Return these experts of ``width``-wide tokens."""
        return ZeroComputationExperts(self, width)


class ZeroComputationExperts(nn.Module):
    """``experts(tokens, weights)``: tokens (B, T, d) and weights (B, T, Z) to their weighted sum.

    The order is constants, copies, zeros. ``vectors`` (C, d) are the constants, ``mixing``
    (C, 2, d) gives by a softmax the shares of the token and of the vector (§3.1).
    """

    def __init__(self, config: ZeroComputation, width: int) -> None:
        super().__init__()
        self.sizes = (config.constants, config.copies, config.zeros)
        self.vectors = nn.Parameter(torch.randn(config.constants, width))
        drawn = nn.init.trunc_normal_(torch.empty(config.constants, 2, width), std=0.02)
        self.mixing = nn.Parameter(drawn)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        constants, copies, _ = weights.split(self.sizes, dim=-1)
        with full_precision(tokens):
            wide = tokens.to(weights.dtype)
            shares = torch.einsum("btd,cmd->btcm", wide, self.mixing).softmax(dim=-1)
            of_token, of_vector = (constants.unsqueeze(-1) * shares).unbind(dim=-1)
            kept = of_token.sum(dim=-1, keepdim=True) + copies.sum(dim=-1, keepdim=True)
            return kept * wide + of_vector @ self.vectors

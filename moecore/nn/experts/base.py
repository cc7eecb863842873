"""The base class of experts, and experts without a network (MoE++).

Experts without a network cost almost nothing (2410.07348). Z of them, C of which mix the token with
a learned vector (constants); R rows.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.core.config import Config, Part
from moecore.nn.kernels.grouped import full_precision


class Experts(Part, ABC):
    """Base class of the settings of a layer's experts; ``build`` returns their module.

    Experts with bases (``provides`` contains "basis") have a parameter ``basis`` (E, d, r).
    """

    # what routers and regularizers can read of them: "basis", or nothing
    provides: ClassVar[frozenset[str]] = frozenset()
    # hidden units between two maps: experts can be averaged, or split into pieces
    has_hidden_units: ClassVar[bool] = False
    start_settings: ClassVar[tuple[str, ...]] = ()  # settings of the initial weights
    number: int  # of networks

    @property
    def networks(self) -> int:
        """Return how many of the experts that a router chooses among have a network."""
        return self.number

    @property
    def choices(self) -> int:
        """Return how many experts a router chooses among: networks, then experts without one."""
        return self.networks

    def scale_k(self, k: int) -> int:
        """Return how many experts, or pieces of split experts, a token uses for a router's k."""
        return k

    @abstractmethod
    def build(self, width: int) -> "ExpertsModule":
        """Return the experts for tokens of this width, d."""

    def build_shared(self, width: int) -> "ExpertsModule | None":
        """Return the shared experts, which every token uses, as one module; None without any."""
        return None

    def build_zero_computation(self, width: int) -> "ZeroComputationExperts | None":
        """Return the experts without a network (``choices`` − ``networks``); None for 0."""
        return None


class ExpertsModule(nn.Module):
    """Maps Rows of values (R, d) to values (R, d); each parameter has a row per expert, (E, …)."""

    can_copy_mlp: bool = False  # each expert can begin with the weights of a dense MLP

    def lent_basis(self) -> Tensor | None:
        """Return the bases (E, d, r) that the router can use; None without bases."""
        return None


def expert_grid_shape(experts: int) -> tuple[int, int]:
    """Return rows and columns of the grid of experts, as square as possible (MoGE, algorithm 1)."""
    # 8 → (2, 4), 400 → (20, 20), prime p → (1, p).
    rows = next(rows for rows in range(math.isqrt(experts), 0, -1) if experts % rows == 0)
    return rows, experts // rows


def default_rank(width: int) -> int:
    # Grouped products in bf16 need multiples of 8. The paper gives no rank. A full one (r = d)
    # cannot route: a square orthonormal Bᵀ rotates x and c equally, so every expert scores
    # cos(x, c). 2/3 is 512 for ViT-B; with both maps factored, V-MoE's 285 million parameters
    # become 247 million, where table S2 says 243.
    return min(width, 512, max(8, 2 * width // 3 // 8 * 8))


def draw_bases(experts: int, width: int, rank: int) -> nn.Parameter:
    """Draw bases (E, d, r) with orthonormal columns: QR of normal draws."""
    bases = torch.empty(experts, width, rank)
    for basis in bases:
        nn.init.orthogonal_(basis)
    return nn.Parameter(bases)


def positive_qr(bases: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q (E, d, r) and R (E, r, r) of bases (E, d, r), in fp64, with diag(R) ≥ 0."""
    basis, triangle = torch.linalg.qr(bases.double())
    # the diagonal of a rank-deficient basis has zeros
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(basis)
    return basis * signs.unsqueeze(-2), signs.unsqueeze(-1) * triangle


class ZeroComputation(Config):
    """Numbers of experts without a network, which follow the networks in a router's choices."""

    constants: int = Field(1, ge=0, le=2**16, description="mix the token with a learned vector")
    copies: int = Field(1, ge=0, le=2**16, description="experts that return the token unchanged")
    zeros: int = Field(1, ge=0, le=2**16, description="experts returning 0: tokens skip the layer")

    @model_validator(mode="after")
    def _check_at_least_one(self) -> "ZeroComputation":
        if not self.number:
            raise ValueError("found no expert; allowed: at least one, or null instead of all three")
        return self

    @property
    def number(self) -> int:
        """Return the number of experts without a network, Z."""
        return self.constants + self.copies + self.zeros


class ZeroComputationExperts(nn.Module):
    """``experts(tokens, weights)``: their weighted sum for tokens (B, T, d), weights (B, T, Z)."""

    def __init__(self, config: ZeroComputation, width: int) -> None:
        super().__init__()
        self.sizes = (config.constants, config.copies, config.zeros)
        # The constants (C, d); the softmax of ``mixing`` (C, 2, d) gives the shares of the token
        # and of the vector (§3.1).
        self.vectors = nn.Parameter(torch.randn(config.constants, width))
        mixing = nn.init.trunc_normal_(torch.empty(config.constants, 2, width), std=0.02)
        self.mixing = nn.Parameter(mixing)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        constants, copies, _ = weights.split(self.sizes, dim=-1)
        with full_precision(tokens):
            wide = tokens.to(weights.dtype)
            shares = torch.einsum("btd,cmd->btcm", wide, self.mixing).softmax(dim=-1)
            token_shares, vector_shares = (constants.unsqueeze(-1) * shares).unbind(dim=-1)
            token_weights = token_shares.sum(-1, keepdim=True) + copies.sum(-1, keepdim=True)
            return token_weights * wide + vector_shares @ self.vectors

"""What every experts say of themselves, and the experts without a network.

The latter cost almost nothing: MoE++'s (Jin et al. 2024, 2410.07348). B images, T tokens per image,
E experts, Z experts without a network, C constants, R rows, d width.
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
    """The settings of all experts of a layer, a family of parts.

    Experts that lend their bases (``provides`` names "basis") have a parameter ``basis`` (E, d, r).
    """

    provides: ClassVar[frozenset[str]] = frozenset()
    # hidden units between two maps: experts may be averaged, or cut into pieces
    has_hidden_units: ClassVar[bool] = False
    start_settings: ClassVar[tuple[str, ...]] = ()  # which say how weights start
    number: int

    @property
    def networks(self) -> int:
        """Return how many of the experts that a router chooses among are networks."""
        return self.number

    @property
    def choices(self) -> int:
        """Return how many experts a router chooses among, E of a record: networks come first."""
        return self.networks

    def scale_k(self, k: int) -> int:
        """Return how many of these a token uses where ``k`` experts are written."""
        return k

    @abstractmethod
    def build(self, width: int) -> "ExpertsModule":
        """Return the experts of ``width``-wide tokens."""

    def build_shared(self, width: int) -> "ExpertsModule | None":
        """Return experts that see every token beside these, as one; None where there are none."""
        return None

    def build_zero_computation(self, width: int) -> "ZeroComputationExperts | None":
        """Return those without a network, of which there are ``choices`` − ``networks``."""
        return None


class ExpertsModule(nn.Module):
    """The experts of a layer: ``experts(rows)`` with Rows of values (R, d) returns such values."""

    def lent_basis(self) -> Tensor | None:
        """The bases (E, d, r) that the router may use; None where there are none."""
        return None


def map_shape(experts: int) -> tuple[int, int]:
    """Rows and columns of the map, as square as the number allows (MoGE, algorithm 1).

    Rows are the largest divisor not above √experts: 8 → (2, 4), 400 → (20, 20), prime p → (1, p).
    """
    rows = next(rows for rows in range(math.isqrt(experts), 0, -1) if experts % rows == 0)
    return rows, experts // rows


def default_rank(width: int) -> int:
    """Two thirds of ``width``, down to a multiple of 8 (grouped products in bf16 need that), at
    least 8, at most 512 and ``width``.

    The paper gives no rank. A full one (r = d) cannot route: a square orthonormal Bᵀ turns x and c
    alike, so every expert scores cos(x, c). Two thirds are 512 for ViT-B; with both maps factored
    that makes 247 million parameters out of V-MoE's 285, where table S2 says 243.
    """
    return min(width, 512, max(8, 2 * width // 3 // 8 * 8))


def draw_bases(experts: int, width: int, rank: int) -> nn.Parameter:
    """(E, d, r) with orthonormal columns: QR of normal draws."""
    bases = torch.empty(experts, width, rank)
    for basis in bases:
        nn.init.orthogonal_(basis)
    return nn.Parameter(bases)


def positive_qr(bases: Tensor) -> tuple[Tensor, Tensor]:
    """Q (E, d, r) and R (E, r, r) of bases, in fp64, with diag(R) ≥ 0."""
    basis, triangle = torch.linalg.qr(bases.double())
    # a rank-deficient basis has zeros there
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(basis)
    return basis * signs.unsqueeze(-2), signs.unsqueeze(-1) * triangle


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

"""Experts with an orthonormal basis, which the router can share (ERMoE, §2.1 and Algorithm 1).

E experts, R rows, d token width, r rank of a basis, h hidden width.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from moecore.core.files import UserError
from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule, default_rank, draw_bases, positive_qr
from moecore.nn.kernels.grouped import grouped_linear, grouped_mlp

_STD = 0.02  # of the entries of both maps at the start, as the plain `mlp` experts have them


class Eigen(Experts):
    """W1 = U diag(s) Bᵀ, GELU, W2, with biases; B (d, r) starts orthonormal."""

    provides: ClassVar[frozenset[str]] = frozenset({"basis"})

    kind: Literal["eigen"] = "eigen"
    number: int = Field(8, ge=2, le=2**16, description="experts")
    hidden_ratio: float = Field(
        4.0, gt=0, le=1000, description="hidden width of an expert over the token's"
    )
    rank: int | None = Field(
        None, ge=1, description="columns of a basis; null: two thirds of d, at most 512"
    )
    factored_output: bool = Field(
        False, description="the second map too has that rank, instead of being dense"
    )

    def build(self, width: int) -> "EigenExperts":
        """The experts of ``width``-wide tokens; UserError where the rank is larger."""
        if self.rank is not None and self.rank > width:
            raise UserError(
                f"experts.rank is {self.rank}, but tokens are {width} wide (model.width); rank "
                f"may be at most {width}, or null"
            )
        return EigenExperts(self, width)


class EigenExperts(ExpertsModule):
    """``experts(rows)``: Rows of values (R, d), or ``projected`` (R, r), to values (R, d).

    ``basis`` (E, d, r) is B, ``scale`` (E, r) is s, ``up`` (E, r, h) is Uᵀ: x B diag(s) Uᵀ.
    """

    def __init__(self, config: Eigen, width: int) -> None:
        super().__init__()
        number = config.number
        hidden = max(1, round(config.hidden_ratio * width))
        rank = config.rank or default_rank(width)
        self.basis = draw_bases(number, width, rank)
        self.scale = nn.Parameter(torch.ones(number, rank))
        # An entry of W1 is a sum of r products of entries of U and B. Orthonormal columns have
        # entries of variance 1/d, so it has variance r·std²/d: with std = 0.02·sqrt(d/r) that is
        # 0.02².
        self.up = _normal(number, rank, hidden, std=_STD * (width / rank) ** 0.5)
        self.up_bias = nn.Parameter(torch.zeros(number, hidden))
        # A factored W2 is the mirror image: its last factor spreads r numbers as a basis does, with
        # entries of variance 1/d.
        inner = None
        if config.factored_output:
            inner = _normal(number, hidden, rank, std=_STD * (width / rank) ** 0.5)
        self.down_inner = inner
        self.down_bias = nn.Parameter(torch.zeros(number, width))
        if inner is None:
            self.down = _normal(number, hidden, width, std=_STD)
        else:
            self.down = _normal(number, rank, width, std=width**-0.5)

    def lent_basis(self) -> Tensor:
        """The experts' own bases."""
        return self.basis

    def forward(self, rows: Rows) -> Tensor:
        offsets = rows.offsets
        values = rows.values
        if not rows.projected:
            values = grouped_linear(values, self.basis, None, offsets)
        up = self.scale.unsqueeze(-1) * self.up
        if self.down_inner is None:
            return grouped_mlp(values, up, self.up_bias, self.down, self.down_bias, offsets)
        values = gelu(grouped_linear(values, up, self.up_bias, offsets))
        del up  # its memory is free again before the next product
        values = grouped_linear(values, self.down_inner, None, offsets)
        return grouped_linear(values, self.down, self.down_bias, offsets)

    @torch.no_grad()
    def reorthonormalise(self) -> None:
        """Make every basis orthonormal, functions unchanged: B = QR, B ← Q, and R moves into s, U.

        diag(R) is positive, so an orthonormal basis stays as it is. Each column of the new U
        diag(s) gives its direction to U, which keeps its length (and s its sign), and its length to
        s; a column of zeros leaves U as it was with s = 0. The scores of a router that shares the
        basis change as far as B had left orthonormality. In fp64.
        """
        basis, triangle = positive_qr(self.basis)
        up = self.up.double()
        scale = self.scale.double()
        mixed = triangle @ (scale.unsqueeze(-1) * up)  # the rows are columns of U diag(s)
        before = up.norm(dim=-1)
        after = mixed.norm(dim=-1)
        stretch = torch.copysign(after / torch.where(before > 0, before, 1), scale)
        moved = (after > 0).unsqueeze(-1)
        self.basis.copy_(basis)
        self.up.copy_(torch.where(moved, mixed / torch.where(moved, stretch.unsqueeze(-1), 1), up))
        # s = 0 beside U = 0 could never leave it
        self.scale.copy_(torch.where((after == 0) & (before == 0), scale, stretch))


def _normal(*size: int, std: float) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(size), std=std))

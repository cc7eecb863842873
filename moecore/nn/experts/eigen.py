"""Experts with an orthonormal basis of rank r (ERMoE, §2.1, Algorithm 1); h hidden, R rows."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from moecore.core.files import UserError
from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule, default_rank, draw_bases, positive_qr
from moecore.nn.kernels.grouped import grouped_linear, grouped_mlp

_STD = 0.02  # of the initial entries of both maps, as in `mlp` experts


class Eigen(Experts):
    """W1 = U diag(s) Bᵀ, GELU, W2, with biases; B (d, r) is orthonormal at the start."""

    provides: ClassVar[frozenset[str]] = frozenset({"basis"})

    kind: Literal["eigen"] = "eigen"
    number: int = Field(8, ge=2, le=2**16, description="number of experts")
    hidden_ratio: float = Field(4.0, gt=0, le=1000, description="hidden width / width of a token")
    rank: int | None = Field(None, ge=1, description="columns of a basis; null: 2/3 d, at most 512")
    factored_output: bool = Field(False, description="factor the second map too, at this rank")

    def build(self, width: int) -> "EigenExperts":
        if self.rank is not None and self.rank > width:
            raise UserError(
                f"experts.rank is {self.rank}, but tokens are {width} wide (model.width); rank "
                f"may be at most {width}, or null"
            )
        return EigenExperts(self, width)


# ``basis`` (E, d, r) is B, ``scale`` (E, r) is s, ``up`` (E, r, h) is Uᵀ: x B diag(s) Uᵀ.
class EigenExperts(ExpertsModule):
    """``experts(rows)``: Rows of values (R, d), or ``projected`` (R, r), to values (R, d)."""

    def __init__(self, config: Eigen, width: int) -> None:
        super().__init__()
        number = config.number
        hidden = max(1, round(config.hidden_ratio * width))
        rank = config.rank or default_rank(width)
        self.basis = draw_bases(number, width, rank)
        self.scale = nn.Parameter(torch.ones(number, rank))
        # An entry of W1 is a sum of r products of entries of U and B. Entries of orthonormal
        # columns have variance 1/d, so it has variance r·std²/d, 0.02² for std = 0.02·sqrt(d/r).
        self.up = _normal(number, rank, hidden, std=_STD * (width / rank) ** 0.5)
        self.up_bias = nn.Parameter(torch.zeros(number, hidden))
        # A factored W2 is the mirror image: entries of its last factor have variance 1/d, too.
        self.down_inner: nn.Parameter | None = None
        self.can_copy_mlp = not config.factored_output
        inputs, std = hidden, _STD
        if config.factored_output:
            self.down_inner = _normal(number, hidden, rank, std=_STD * (width / rank) ** 0.5)
            inputs = rank
            std = width**-0.5
        self.down_bias = nn.Parameter(torch.zeros(number, width))
        self.down = _normal(number, inputs, width, std=std)

    def lent_basis(self) -> Tensor:
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
        del up  # frees its memory before the next product
        values = grouped_linear(values, self.down_inner, None, offsets)
        return grouped_linear(values, self.down, self.down_bias, offsets)

    @torch.no_grad()
    def reorthonormalise(self) -> None:
        """Replace bases B = QR by Q and absorb R into s and U: outputs do not change."""
        # In fp64. Each column of the new U diag(s) gives its direction to U, which keeps its length
        # (and s its sign), and its length to s; zeros leave U unchanged with s = 0. The scores of a
        # router that shares the basis change as far as B had departed from orthonormality.
        basis, triangle = positive_qr(self.basis)
        up = self.up.double()
        scale = self.scale.double()
        mixed = triangle @ (scale.unsqueeze(-1) * up)  # its rows are the columns of U diag(s)
        old_length = up.norm(dim=-1)
        new_length = mixed.norm(dim=-1)
        stretch = torch.copysign(new_length / torch.where(old_length > 0, old_length, 1), scale)
        has_length = (new_length > 0).unsqueeze(-1)
        self.basis.copy_(basis)
        divisor = torch.where(has_length, stretch.unsqueeze(-1), 1)
        self.up.copy_(torch.where(has_length, mixed / divisor, up))
        # s = 0 with U = 0 would have no gradient ever again
        self.scale.copy_(torch.where((new_length == 0) & (old_length == 0), scale, stretch))


def _normal(*size: int, std: float) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(size), std=std))

"""The orthogonality penalty: ‖BᵀB − I‖² over the bases of a model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moecore.core.files import UserError
from moecore.nn.experts.eigen import Eigen
from moecore.nn.layers.moe import MoELayer
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.training.regularizers.orthogonality import Orthogonality, orthogonality
from tests.training.small import step


def of_model(model):
    return Orthogonality(weight=7.0)(step()._replace(model=model))


def test_value_by_hand():
    # Expert 0: columns (1, 1, 0) and (0, 2, 0): BᵀB = [[2, 2], [2, 4]], minus I = [[1, 2], [2, 3]]:
    # 1 + 4 + 4 + 9 = 18. Expert 1: columns (0, 0, 0) and (0, 0, 1): BᵀB − I = [[−1, 0], [0, 0]]: 1.
    # Together 19, not their mean and not a norm.
    basis = torch.tensor([[[1.0, 0], [1, 2], [0, 0]], [[0, 0], [0, 0], [0, 1]]])
    assert orthogonality(basis=basis).item() == 19
    assert orthogonality(basis=basis[1:]).item() == 1


@given(st.integers(0, 999), st.integers(1, 5))
@settings(deadline=None)
def test_orthonormal_columns_cost_nothing_and_rotations_change_nothing(seed, rank):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    turn, basis = torch.linalg.qr(draw(5, 5)).Q, draw(3, 5, rank)
    assert orthogonality(basis=turn[:, :rank].expand(3, -1, -1)).item() == pytest.approx(
        0, abs=1e-24
    )
    torch.testing.assert_close(orthogonality(basis=turn @ basis), orthogonality(basis=basis))
    torch.testing.assert_close(
        orthogonality(basis=basis.flip(0)), orthogonality(basis=basis)
    )  # relabelled experts


def test_gradient():
    basis = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda basis: orthogonality(basis=basis), basis)
    # d/dB ‖BᵀB − I‖² = 4 B (BᵀB − I)
    (gradient,) = torch.autograd.grad(orthogonality(basis=basis), basis)
    torch.testing.assert_close(gradient, 4 * basis @ (basis.mT @ basis - torch.eye(3)))


def test_autocast_does_not_round_it():
    basis = torch.linalg.qr(torch.randn(2, 64, 40)).Q
    with torch.autocast("cpu", torch.bfloat16):
        value = orthogonality(basis=basis)
    assert value.dtype == torch.float32 and value < 1e-8  # rounded to bf16 it would be some 1e-2


def test_layers_are_summed_whoever_owns_the_basis():
    experts = Eigen(number=3, rank=2).build(4)
    shared = MoELayer(
        Eigenbasis().build(4, 3, experts.basis), experts, Eigenbasis().wants, Eigen.provides
    )
    own = Eigenbasis(rank=2).build(4, 3)
    model = nn.ModuleDict({"shared": shared, "own": own, "dense": nn.Linear(4, 4)})
    model["dense"].register_parameter(
        "no_basis", nn.Parameter(torch.randn(3, 4, 2))
    )  # not called `basis`
    with torch.no_grad():
        experts.basis.mul_(2)  # BᵀB − I = 3 I: 9·r = 18 an expert, 54
        own.basis.mul_(0)  # −I: r = 2 an expert, 6
    assert of_model(model).item() == pytest.approx(60, rel=1e-5)
    assert of_model(own).item() == pytest.approx(6)  # a parameter of the model itself


def test_a_model_without_basis_is_refused():
    with pytest.raises(UserError, match="the model has no basis"):
        of_model(nn.Linear(2, 2))
    assert Orthogonality.needs == {"routing", "basis"} and Orthogonality().weight == 5e-5

"""Experts: an MLP each."""

import pytest
import torch
from torch.nn.functional import gelu, linear

from moecore.nn.dispatch import Rows
from moecore.nn.experts.mlp import Mlp


def test_each_expert_is_its_own_mlp():
    experts = Mlp(number=3).build(8)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    values = torch.randn(6, 8)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    outputs = experts(Rows(values, offsets))
    for row, expert in enumerate([0, 0, 2, 2, 2, 2]):
        hidden = gelu(linear(values[row], experts.up[expert].t(), experts.up_bias[expert]))
        expected = linear(hidden, experts.down[expert].t(), experts.down_bias[expert])
        torch.testing.assert_close(outputs[row], expected, atol=1e-4, rtol=1e-4)


def test_shapes_and_start():
    experts = Mlp(number=4, hidden_ratio=2.0).build(64)
    assert experts.up.shape == (4, 64, 128) and experts.down.shape == (4, 128, 64)
    assert experts.up_bias.shape == (4, 128) and experts.down_bias.shape == (4, 64)
    assert not experts.up_bias.any() and not experts.down_bias.any()
    for weight in (experts.up, experts.down):
        # timm: trunc_normal_(std=0.02), cut at ±2, so hardly at all
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_experts_start_apart_or_identical():
    apart = Mlp(number=3).build(8)
    same = Mlp(number=3, init="identical").build(8)
    assert not torch.equal(apart.up[0], apart.up[1])
    assert torch.equal(same.up[0], same.up[2]) and torch.equal(same.down[0], same.down[1])
    assert same.up.is_contiguous()
    with torch.no_grad():
        same.up[0].zero_()
    assert same.up[1].any()  # the copies do not share memory


def test_double_precision_gradients():
    experts = Mlp(number=2, hidden_ratio=1.0).build(3).double()
    offsets = torch.tensor([2, 3], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda values: experts(Rows(values, offsets)),
        torch.randn(3, 3, dtype=torch.float64, requires_grad=True),
    )

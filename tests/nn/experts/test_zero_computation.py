"""MoE++'s experts without a network, the logits that go from layer to layer, and their balance."""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.base import ZeroComputation
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.meta_device import meta_device_context
from moecore.nn.routers.competition import Competition
from moecore.nn.routers.frozen_copy import FrozenCopy
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.soft_slots import SoftSlots
from moecore.testing.check_helpers import IMAGE, draw_weights
from moecore.training.regularizers.zero_computation_balance import (
    ZeroComputationBalance,
    uneven_use,
)
from tests.training.small import step

VIT = Vit(patch=2, width=8, depth=2, heads=2)


def moe_of(router, **counts):
    experts = Mlp(number=2, hidden_ratio=2.0, zero_computation=ZeroComputation(**counts))
    return MoESettings(router=router, experts=experts, blocks="all")


def test_one_token_by_hand():
    # Logits (.1, .1, .8, .2, .9) + .1 (1, 0, 0, 0, 2): zero and the constant are chosen, whose
    # shares are softmax(1, −1): .253545 (.880797 (1, −1) + .119203 (.5, .5)).
    layer = moe_of(NoisyTopK(residual=True)).build(2).eval()
    token = torch.tensor([[[1.0, -1.0]]])
    layer.router.weight.data = torch.tensor([[0.1, 0.1, 0.8, 0.2, 0.9], [0.0] * 5]).T
    layer.router.residual.data = 0.1 * torch.eye(5)
    layer.zero_computation.vectors.data = torch.tensor([[0.5, 0.5]])
    layer.zero_computation.mixing.data = torch.eye(2)[None]
    context = RoutingContext(previous=torch.tensor([[[1.0, 0, 0, 0, 2]]]))
    output, (record,) = layer(token, context)
    torch.testing.assert_close(record.logits.flatten(), torch.tensor([0.2, 0.1, 0.8, 0.2, 1.1]))
    weights = torch.tensor([0, 0, 0.253545, 0, 0.34225])
    torch.testing.assert_close(record.combine.flatten(), weights, atol=1e-6, rtol=0)
    expected = torch.tensor([0.238434, -0.20821])
    torch.testing.assert_close(output.flatten(), expected, atol=1e-6, rtol=0)
    layer.router.weight.data[:, 0] = torch.tensor([-1.0, 1, 0, 2, 0])  # expert 1 and the copy
    layer.experts.down.data.zero_()
    layer.experts.down_bias.data = torch.tensor([[2.0, 0], [0, 3]])
    output, (record,) = layer(token)
    both = record.combine[..., 1:2] * torch.tensor([0.0, 3]) + record.combine[..., 3:4] * token
    torch.testing.assert_close(output, both)


def test_balance_by_hand():
    # f = (½, ½, ½, 0, ½) of 2 tokens, P = (.3, .225, .175, .1, .2), τ = ¾:
    # ½ (.3 + .225) + ¾ ½ (.175 + .2) = .403125.
    probs = torch.tensor([[[0.4, 0.1, 0.1, 0.1, 0.3], [0.2, 0.35, 0.25, 0.1, 0.1]]])
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.topk(2).indices, True)
    leaf = probs.clone().requires_grad_()
    record = RoutingRecord(leaf, leaf, leaf, chosen, leaf)
    loss = uneven_use(record, 2, 0.75)
    assert loss.item() == pytest.approx(0.403125)
    (gradient,) = torch.autograd.grad(loss, leaf)  # η f / N
    expected = torch.tensor([0.25, 0.25, 0.1875, 0, 0.1875])
    torch.testing.assert_close(gradient, expected.expand(1, 2, 5))
    model = VIT.build(IMAGE, MoESettings(router=NoisyTopK(), experts=Mlp(), blocks="all"))
    with pytest.raises(UserError, match="^zero_computation_balance: all experts are networks; al"):
        ZeroComputationBalance(weight=1)(step(record)._replace(model=model))


@pytest.mark.parametrize("k", [1, 2])
def test_networks_compute_what_chose_them_and_no_more(k):
    torch.manual_seed(0)
    moe = moe_of(NoisyTopK(k=k), zeros=2)
    model = VIT.build(IMAGE, moe)
    draw_weights(model)
    images = torch.rand(3, 1, 8, 8)
    used = [int(one.chosen[..., :2].sum()) for one in model.eval()(images).routing]
    whole, routing = whole_and_routing_flops(model, images)
    with meta_device_context():  # without data a third of the choices: 2 of 6
        blank = VIT.build(IMAGE, moe)
    expected, aside = whole_and_routing_flops(blank, torch.empty(3, 1, 8, 8, device="meta"))
    of_pair = 4 * 8 * 16
    dense = expected - aside - 2 * 17 * k / 3 * of_pair
    assert 0 < sum(used) < 2 * 3 * 17 * k
    assert whole - routing == pytest.approx(dense + sum(used) / 3 * of_pair)
    assert moe.active_share == k / 6


def test_tokens_that_choose_no_network_and_a_compiled_layer():
    torch.manual_seed(0)
    layer = moe_of(NoisyTopK(k=2)).build(8).eval()
    draw_weights(layer)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # every row is computed
    for change in (0.0, -1e9):
        with torch.no_grad():
            layer.router.weight[:2, 0] += change
        results = [
            (one, *torch.autograd.grad(one.square().sum(), [tokens, *layer.parameters()]))
            for one in (run(tokens.abs())[0] for run in (layer, compiled))
        ]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert not layer(tokens.abs())[1][0].chosen[..., :2].any() and not results[0][3].any()


def test_logits_go_from_layer_to_layer_of_equal_tokens():
    images = torch.rand(2, 1, 8, 8)
    staged = Swin(patch=1, width=8, depths=(1, 2), heads=(2, 2), window=4)
    for backbone, learns in ((VIT, [False, True]), (staged, [False, False, True])):
        models = []
        for residual in (False, True):
            torch.manual_seed(0)
            models.append(backbone.build(IMAGE, moe_of(NoisyTopK(residual=residual))).eval())
        plain, model = models
        output = model(images)
        assert torch.equal(plain(images).prediction, output.prediction)  # the maps begin at 0
        routers = [module for module in model.modules() if hasattr(module, "residual")]
        routers = [module.residual for module in routers if module.residual is not None]
        loss = output.routing[-1].logits.square().sum() + output.prediction.square().sum()
        gradients = torch.autograd.grad(loss, routers, allow_unused=True)
        assert [one is not None and bool(one.any()) for one in gradients] == learns


def test_what_goes_together_and_what_does_not():
    with pytest.raises(UserError, match="^experts.zero_computation: found .* soft_slots gives"):
        moe_of(SoftSlots()).build(8)
    competition = Competition(router_weight=0, chosen_weight=0, diversity_weight=0)
    with pytest.raises(UserError, match="^experts.zero_computation: found some beside .* comp"):
        moe_of(competition).build(8)
    with pytest.raises(ValidationError, match="found no expert; allowed: at least one"):
        ZeroComputation(constants=0, copies=0, zeros=0)
    with pytest.raises(ValidationError, match="router.residual: found true, .*; allowed: false"):
        FrozenCopy(router=NoisyTopK(residual=True))
    with pytest.raises(UserError, match=r"^router\.k is 6, but there are 5"):
        moe_of(NoisyTopK(k=6)).build(8)

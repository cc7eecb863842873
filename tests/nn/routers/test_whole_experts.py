"""Routers that need the experts, by hand: competition their outputs, a merger their parameters."""

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.eigen import Eigen
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings, build_moe_feed_forward
from moecore.nn.routers.competition import Competition, mean_cosine_among_chosen
from moecore.nn.routers.merged import Merged
from tests.nn.routers import reference
from tests.training.small import COMPETITION, IMAGE

WEIGHTS = ("router_weight", "chosen_weight", "diversity_weight", "bal_comp")
OUTPUTS = [[[1.0, -1], [0.5, 0.5], [-2, 0]], [[0, 3], [1, 1], [2, -1]]]
LOGITS = [[1.0, 0, 0], [0, 1, 0.5]]


def competing(*weights, bal_comp=0.0, **settings) -> Competition:
    """The router with these weights; without what balances strengths, unless it is asked for."""
    return Competition(**dict(zip(WEIGHTS, (*weights, bal_comp), strict=True)), **settings)


def decide(*weights, padding=None, **settings):
    """What a step of competition says of the outputs, of a router whose logits are its tokens."""
    router = competing(*weights, **settings).build(3, 3).train()
    router.weight.data = torch.eye(3)
    outputs = torch.tensor([OUTPUTS], requires_grad=True)
    context = RoutingContext(outputs=outputs, padding=padding)
    return router, outputs, router(torch.tensor([LOGITS]), context)[1]


def test_competition_by_hand():
    # Strengths, (softplus 1 + softplus −1) / 2 = .813262 first: (.813262, .974077, .410038) and
    # (1.870867, 1.313262, 1.220095); the two largest over their sums.
    _, _, record = decide(1.0, 0.0, 0.0)
    combine = [[[0.455013, 0.544987, 0], [0.58756, 0.41244, 0]]]
    torch.testing.assert_close(record.combine, torch.tensor(combine), atol=1e-6, rtol=0)
    torch.testing.assert_close(record.probs, torch.tensor([LOGITS]).softmax(dim=-1))
    assert record.penalty.mean().item() == pytest.approx(0.038972, abs=1e-6)
    both = decide(1.0, 1.0, 0.0)[2].penalty.mean().item()
    assert both - record.penalty.mean().item() == pytest.approx(0.057481, abs=1e-6)
    # (1, −1) and (½, ½) are at right angles; (0, 3) and (1, 1) have .707107, twice of four
    alike = mean_cosine_among_chosen(torch.tensor([OUTPUTS]), torch.tensor([[[1, 0], [0, 1]]]))
    torch.testing.assert_close(alike, torch.tensor([[0, 0.353553]]), atol=1e-6, rtol=0)
    assert decide(0.0, 0.0, 1.0)[2].penalty.mean().item() == pytest.approx(0.176777 / 2, abs=1e-6)


def test_the_balance_of_strengths_by_hand():
    # Softmax of the strengths above: (.351787, .413162, .235051) and (.477504, .273409, .249087).
    # Expert 1 is the first token's strongest, 0 the second's: 3 (½ P_0 + ½ P_1) of each.
    penalty = decide(0.0, 0.0, 0.0, bal_comp=1.0)[2].penalty
    torch.testing.assert_close(penalty, torch.tensor([[1.147424, 1.126370]]), atol=1e-6, rtol=0)
    # where the second only pads, expert 1 has won all: 3 P_1
    pads = torch.tensor([[False, True]])
    alone = decide(0.0, 0.0, 0.0, bal_comp=1.0, padding=pads)[2].penalty
    assert alone[0, 0].item() == pytest.approx(1.239487, abs=1e-6)
    # the code's default; weighted as it says; it moves the experts and not the router
    default = Competition(router_weight=0, chosen_weight=0, diversity_weight=0)
    assert default.bal_comp == 0.01
    router, outputs, record = decide(0.0, 0.0, 0.0, bal_comp=0.01)
    torch.testing.assert_close(record.penalty, 0.01 * penalty)
    inputs = (router.weight, outputs)
    to_router, to_experts = torch.autograd.grad(record.penalty.sum(), inputs, allow_unused=True)
    assert not to_router.any() and to_experts.any()


def test_who_learns_from_a_competition():
    router, outputs, record = decide(1.0, 0.5, 0.0)
    inputs = (router.weight, outputs)
    of_task = torch.autograd.grad(record.combine[..., 0].sum(), inputs, allow_unused=True)
    assert of_task[0] is None and of_task[1].any()
    to_router, to_experts = torch.autograd.grad(record.penalty.sum(), inputs, allow_unused=True)
    assert to_router.any() and to_experts is None
    _, outputs, record = decide(0.0, 0.0, 1.0)
    assert torch.autograd.grad(record.penalty.sum(), outputs)[0].any()


def test_only_training_competes_and_else_the_largest_probs_choose():
    layer = reference.layer_of(competing(1.0, 0.0, 0.0))
    tokens = torch.randn(2, 7, 8)
    top = (tokens @ layer.router.weight.T).topk(2)
    expected = torch.zeros(2, 7, 4).scatter(-1, top.indices, top.values.softmax(dim=-1))
    for training, progress, like in ((False, 0.0, True), (True, 1.0, True), (True, 0.0, False)):
        _, (record,) = layer.train(training)(tokens, RoutingContext(progress=progress))
        assert torch.allclose(record.combine, expected, atol=1e-6) == like
        assert (record.penalty is None) != training
        assert not training or record.penalty.any() != like


def test_the_schedule_is_drawn_from_the_step_alone():
    router = competing(0.0, 0.0, 0.0, share=0.1, warmup=0.25)

    def phases(progress):
        torch.manual_seed(4)
        return [router.phase(progress) for _ in range(1000)]

    assert phases(0.25) == phases(0.9) and 70 < phases(0.25).count(0.0) < 130
    for progress in (0.24, 1.0):  # before the warm-up's end; evaluation
        torch.manual_seed(4)
        before = torch.get_rng_state()
        assert router.phase(progress) == 1.0 and torch.equal(torch.get_rng_state(), before)


def test_layers_compete_by_step_and_layer_whatever_else_is_drawn():
    moe = MoESettings(router=COMPETITION, experts=Mlp(number=4), blocks="all")
    vit = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.3).build(IMAGE, moe).train()

    def competing_layers(step, images):
        pixels = torch.rand(images, 1, 8, 8)
        torch.manual_seed(step)
        routing = vit(pixels, progress=0.5).routing
        return tuple(bool(record.penalty.any()) for record in routing)

    schedule = [competing_layers(step, 3) for step in range(8)]
    assert schedule == [competing_layers(step, 5) for step in range(8)]
    assert len(set(schedule)) > 4 and len(set(zip(*schedule, strict=True))) == 4


def test_merged_experts_by_hand():
    # The mean token (2, ½) has logits (1, ½): shares .622459 and .377541. The merged expert sees
    # (1, 2) as 1.37754 and answers with that times (.81123, .377541).
    layer = build_moe_feed_forward(
        Merged(normalise=False), Mlp(number=2, hidden_ratio=0.5, activation="relu"), 2
    )
    layer.router.weight.data = torch.tensor([[0.5, 0], [0, 1.0]])
    layer.experts.up.data = torch.tensor([[[1.0], [0]], [[0], [1.0]]])
    layer.experts.down.data = torch.tensor([[[1.0, 0]], [[0.5, 1]]])
    output, (record,) = layer(torch.tensor([[[1.0, 2], [3, -1]]]))
    expected = torch.tensor([[[1.117502, 0.520078], [1.2086, 0.562474]]])
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    shares = torch.tensor([0.622459, 0.377541]).expand(1, 2, 2)
    for field in (record.probs, record.combine):
        torch.testing.assert_close(field, shares, atol=1e-6, rtol=0)
    assert record.chosen.all() and record.load.all()


def test_outputs_and_all_gradients_agree_with_image_by_image():
    layer = reference.layer_of(Merged())
    router, experts = layer.router, layer.experts

    def slow(tokens):
        outputs = []
        for image in tokens:
            rows = layer_norm(router.weight, (8,)) * router.gain
            shares = (rows @ layer_norm(image.mean(dim=0), (8,)) + router.bias).softmax(dim=0)
            up, up_bias, down, down_bias = (
                sum(share * one for share, one in zip(shares, parameter, strict=True))
                for parameter in (experts.up, experts.up_bias, experts.down, experts.down_bias)
            )
            outputs.append(gelu(image @ up + up_bias) @ down + down_bias)
        return torch.stack(outputs)

    reference.assert_like(layer, torch.randn(3, 5, 8, requires_grad=True), slow)


def test_a_merged_token_costs_one_expert_and_an_image_the_merger():
    layer = build_moe_feed_forward(Merged(), Mlp(number=4, hidden_ratio=1.5), 8).to("meta")
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(3, 20, 8, device="meta"))
    expert = 2 * 8 * 12
    merger = 4 * (expert + 12 + 8)
    assert counter.get_total_flops() == 2 * 3 * (20 * expert + merger + 4 * 8)
    assert Merged().active(4) == 4  # of all parameters, each image's are made


def test_what_cannot_be_is_refused():
    assert competing(0.1, 0.1, 0.0, k=1).active(8) == 1  # one expert has nobody to differ from
    with pytest.raises(ValidationError, match="diversity_weight: found 0.1, .*; allowed: 0"):
        competing(0.1, 0.1, 0.1, k=1)
    with pytest.raises(UserError, match="^experts.kind: found experts with bases, .*; allowed"):
        build_moe_feed_forward(Merged(), Eigen(number=4), 8)

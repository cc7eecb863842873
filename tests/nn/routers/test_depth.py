"""Mixture-of-Depths: which tokens take part, by hand; who skips; how a token decides by itself."""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.testing.check_helpers import IMAGE
from tests.nn.routers import reference

SCORES = torch.tensor([0.3, -0.2, 1.5, 0.1, -1, 0.8, 0.2, -0.4])
ALONE = NoisyTopK(k=1, renormalise=True, noise_std=0.0)  # one expert, weight 1


def router_of(**settings):
    """A router of tokens (r, v) of two numbers, and as many experts."""
    router = Depth(share=0.25, router=ALONE, **settings).build(2, 2)
    router.weight.data = torch.tensor([[1.0, 0.0]])
    return router


def pass_tokens(plan, tokens):
    """What comes back if every expert gives the token as it is."""
    rows = plan.dispatch(tokens).values
    return plan.combine(rows)


def test_the_largest_scores_take_part_by_hand():
    # Two of eight: 1.5 · 2 and .8 · (−1).
    tokens = torch.stack([SCORES, torch.tensor([1.0, 1, 2, 1, 1, -1, 1, 1])], dim=-1)[None]
    expected = torch.tensor([[0, 0, 3, 0, 0, -0.8, 0, 0]])
    for training in (True, False):
        plan, record = router_of().train(training)(tokens)
        torch.testing.assert_close(pass_tokens(plan, tokens)[..., 1], expected)
        takes_part = record.chosen.any(dim=-1)
        assert torch.equal(takes_part, expected != 0)
        assert (record.probs[~takes_part] == 0.5).all() and not record.logits[~takes_part].any()
    sampled = router_of(sampling="bce", sampling_weight=1)
    _, record = sampled.train()(tokens)
    assert record.penalty.mean().item() == pytest.approx(0.549228, abs=1e-6)
    _, record = sampled.eval()(tokens)
    assert record.chosen.any(dim=-1).int().tolist() == [[1, 0, 1, 1, 0, 1, 1, 0]]
    nobody, _ = sampled(-tokens.abs())
    assert not pass_tokens(nobody, tokens).any()
    _, record = router_of()(torch.zeros(2, 3, 2))  # ties go to the first, and one takes part
    assert record.chosen.any(dim=-1).tolist() == [[True, False, False]] * 2


def test_padding_takes_no_place_of_a_caption_by_hand():
    # Of captions of 8, 5 and 2 own tokens a quarter takes part: 2, 1 and, as one always does, 1.
    # The padding behind has the largest scores of all; the two places of eight that are left go to
    # it, so that as many tokens as ever pass the experts.
    scores = SCORES.repeat(3, 1)
    padding = torch.arange(8) >= torch.tensor([[8], [5], [2]])
    scores[padding] += 9
    tokens = torch.stack([scores, torch.ones(3, 8)], dim=-1)
    for training in (True, False):
        router = router_of().train(training)
        plan, record = router(tokens, RoutingContext(padding=padding))
        takes_part = record.chosen.any(dim=-1) & ~padding
        assert [row.nonzero().flatten().tolist() for row in takes_part] == [[2, 5], [2], [0]]
        assert plan.places.shape == (3, 2)
    _, alone = router(tokens[:1, :, :], RoutingContext(padding=padding[:1]))
    assert torch.equal(alone.combine, router(tokens[:1])[1].combine)  # without any it is as ever


def test_the_layer_is_the_inner_one_of_those_that_take_part_times_their_scores():
    layer = reference.layer_of(Depth(share=0.4, router=NoisyTopK(noise_std=0.0)))
    tokens = torch.randn(3, 10, 8, requires_grad=True)

    def slow(values):
        scores = values @ layer.router.weight[0]
        takes_part = torch.zeros_like(scores).scatter(-1, scores.topk(4, dim=-1).indices, 1)
        gates = (values @ layer.router.router.weight.T).softmax(dim=-1)
        top = gates.topk(2, dim=-1)
        combine = torch.zeros_like(gates).scatter(-1, top.indices, top.values)
        factors = (scores * takes_part).unsqueeze(-1)
        return reference.weighted_sum(layer, values, combine * factors)

    reference.assert_like(layer, tokens, slow)


def test_the_predictor_learns_from_its_loss_alone_and_nothing_else_does():
    router = router_of(sampling="predictor", sampling_weight=1)
    torch.nn.init.normal_(router.outer)
    tokens = torch.randn(2, 8, 2, requires_grad=True)
    plan, record = router.train()(tokens)
    leaves = [tokens, router.weight, router.router.weight, router.inner, router.outer]

    def reached(value):
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
        return [bool((one.abs() > 1e-6).any()) for one in gradients]

    assert reached(record.penalty.sum()) == [False, False, False, True, True]
    assert reached(pass_tokens(plan, tokens).sum()) == [True, True, False, False, False]


def test_skipped_tokens_cost_nothing():
    images = torch.rand(2, 1, 8, 8)  # 17 tokens, of which 4 take part, each with 2 experts
    costs = []
    for share in (0.25, 1.0):
        moe = MoESettings(router=Depth(share=share), experts=Mlp(hidden_ratio=2.0), blocks="all")
        model = Vit(patch=2, width=8, depth=1, heads=2).build(IMAGE, moe)
        whole, routing = whole_and_routing_flops(model, images)
        costs.append(whole - routing)
    assert costs[1] - costs[0] == pytest.approx((17 - 4) * 2 * 4 * 8 * 16)
    assert moe.active_share == 2 / 8 and Depth().active(8) == 0.25


def test_what_cannot_be_is_refused():
    for key, inner in (
        ("balance", {"balance": {"kind": "sinkhorn"}}),
        ("residual", {"residual": True}),
        ("eval_capacity_factor", {"eval_capacity_factor": 1.0}),
    ):
        with pytest.raises(ValidationError, match=f"router.{key}: found one, .*; allowed: none"):
            Depth(sampling="bce", router=NoisyTopK(**inner))
    with pytest.raises(UserError, match="^router.router.k is 9, but there are 8 experts"):
        Depth().with_k(9).build(4, 8)

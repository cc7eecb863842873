"""A MoE layer in somebody's own module: shapes, one clear error for what it does not take, records.
B images, T tokens, E = 4 experts, d = 8.
"""

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.experts.eigen import Eigen
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoELayer
from moecore.nn.router_hooks import routing_collector
from moecore.nn.routers.dynamic import Dynamic
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.frozen_copy import FrozenCopy
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.nn.routers.teacher_routed import TeacherRouted
from tests.attacks.models import vit

EXPERTS = Mlp(number=4, hidden_ratio=1.0)


def layer_of(**router) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(8, NoisyTopK(**router), EXPERTS)


@pytest.mark.parametrize(
    ("shape", "recorded"), [((6, 8), (1, 6)), ((2, 3, 8), (2, 3)), ((2, 3, 5, 8), (2, 15))]
)
def test_tokens_keep_their_shape_and_leave_a_record(shape, recorded):
    layer = layer_of(k=4, renormalise=True).eval()
    tokens = torch.randn(shape)
    with routing_collector(layer) as records:
        output = layer(tokens)
    assert output.shape == shape
    (record,) = records
    assert record.probs.shape == (*recorded, 4)
    # all four are chosen: each token is the weighted sum of all experts on it
    experts = layer.feed_forward.experts
    hidden = torch.einsum("...d,edh->...eh", tokens, experts.up) + experts.up_bias
    each = torch.einsum("...eh,ehd->...ed", torch.nn.functional.gelu(hidden), experts.down)
    weights = record.combine.reshape(*shape[:-1], 4, 1)
    torch.testing.assert_close(output, ((each + experts.down_bias) * weights).sum(-2))


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (torch.randn(8), r"found torch.float32 of shape \(8,\)"),
        (torch.randn(2, 3, 7), r"of shape \(2, 3, 7\); allowed: .* \(B, T, 8\)"),
        (torch.zeros(2, 8, dtype=torch.uint8), "found torch.uint8"),
    ],
)
def test_other_tokens_are_refused_in_one_line(tokens, problem):
    with pytest.raises(UserError, match=f"^tokens: .*{problem}"):
        layer_of()(tokens)


@pytest.mark.parametrize(
    ("router", "reads"),
    [
        (Hash(), "patches"),
        (Eigenbasis(), "attention, basis"),
        (TeacherRouted(), "teacher"),
        (FrozenCopy(), "the training's progress"),
    ],
)
def test_a_router_that_reads_more_than_tokens_is_refused(router, reads):
    with pytest.raises(UserError, match=f"^router: found {router.kind}, which reads {reads};"):
        MoELayer(8, router, EXPERTS)


@pytest.mark.parametrize(
    ("router", "loss"), [(Relu(), "adaptive_l1"), (Dynamic(), "diversity_simplicity")]
)
def test_a_router_whose_loss_records_do_not_suffice_for_is_refused(router, loss):
    with pytest.raises(UserError, match=f"^router: found {router.kind}, whose loss {loss} reads"):
        MoELayer(8, router, EXPERTS)


def test_experts_lend_their_bases():
    layer = MoELayer(8, Eigenbasis(context="learned"), Eigen(number=4))
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8)).sum().backward()
    assert records[0].probs.shape == (1, 5, 4) and layer.feed_forward.experts.basis.grad.any()


def test_records_are_collected_inside_the_with_in_the_order_of_the_calls():
    model = torch.nn.Sequential(layer_of(k=1), layer_of(k=2))
    with routing_collector(model) as records:
        model(torch.randn(5, 8))
        with routing_collector(model[1]) as inner:
            model(torch.randn(3, 8))
    model(torch.randn(5, 8))
    chosen = [(len(one.chosen[0]), int(one.chosen[0, 0].sum())) for one in (*records, *inner)]
    assert chosen == [(5, 1), (5, 2), (3, 1), (3, 2)]
    assert all(layer.records is None for layer in model)


def test_a_compiled_model_leaves_records_too():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer_of())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(5, 8))
    for _ in range(2):
        with routing_collector(compiled) as records:
            compiled(torch.randn(5, 8))
        assert len(records) == 1 and records[0].probs.requires_grad


def test_a_model_of_ours_is_traced_and_a_dense_one_is_not():
    images = torch.rand(2, 1, 8, 8)
    model = vit({"kind": "noisy_top_k"}).eval()
    with routing_collector(model) as records:
        output = model(images)
    assert len(records) == len(output.routing) > 0
    assert all(ours is theirs for ours, theirs in zip(records, output.routing, strict=True))
    for model in (torch.nn.Linear(8, 8), vit(None)):
        with pytest.raises(UserError, match="^trace: .* has no router that is known; allowed: "):
            with routing_collector(model):
                pass


def test_images_of_bytes_are_refused():
    with pytest.raises(UserError, match="^images: found torch.uint8; allowed: .*divide .* by 255"):
        vit(None)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"^images: found values up to 255; allowed: .*\[0, 1\]"):
        vit(None)(torch.full((2, 1, 8, 8), 255.0))

"""timm's models whose MLPs become experts in place, and the loss of their records."""

import pytest
import torch
from torch import nn

from moecore.core.files import UserError
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoELayer
from moecore.nn.router_hooks import routing_collector
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.training.job import routing_loss
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.regularizers.importance import Importance
from moecore.training.regularizers.jensen_shannon import JensenShannon
from moecore.training.regularizers.load import Load
from moecore.training.regularizers.z_loss import ZLoss
from moecore.training.teachers.timm import define_missing_operators
from moecore.training.upcycle import upcycle_in_place
from moecore.training.upcycling_kinds import Drop, Granular
from tests.attacks.models import vit

ROUTER = NoisyTopK(k=2, renormalise=True)
EXPERTS = Mlp(number=4)
SMALL = {"num_classes": 3, "img_size": 32}
VIT = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
MODELS = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
}


def timm_model(name: str = "vit_tiny_patch16_224", **changes) -> nn.Module:
    """A small model of timm whose every part counts: no weight is 0."""
    define_missing_operators()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **SMALL, **MODELS[name], **changes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_it_did_and_its_routers_learn_from_the_records(name):
    model = timm_model(name)
    images = torch.rand(2, 3, 32, 32)
    before = model(images)
    layers = upcycle_in_place(model, router=ROUTER, experts=EXPERTS, blocks=(1, 2))
    assert [type(block.mlp) for block in model.modules() if hasattr(block, "mlp")].count(MoELayer)
    with routing_collector(model) as records:
        after = model(images)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    assert len(records) == 2 and all(record.probs.shape[0] == 2 for record in records)
    assert routing_loss(records, []) == 0
    (after.sum() + routing_loss(records, [Load(weight=0.1)])).backward()
    for layer in layers:
        assert layer.feed_forward.router.weight.grad.any()
        assert layer.feed_forward.experts.up.grad.any() and not layer.training


def test_pieces_of_copies_compute_what_the_model_did():
    model, images = timm_model(), torch.rand(2, 3, 32, 32)
    before = model(images)
    quiet = NoisyTopK(k=2, renormalise=True, noise_std=0)
    halves = Mlp(number=4, hidden_ratio=2)
    upcycle_in_place(model, router=quiet, experts=halves, kind=Granular(pieces=2))
    torch.testing.assert_close(model(images), before, atol=1e-5, rtol=1e-4)


def test_half_of_each_copys_units_are_drawn_anew_by_the_seed():
    units = []
    for seed in (0, 0, 1):
        model = timm_model()
        fc1 = model.blocks[3].mlp.fc1.weight.clone()
        drop = Drop(ratio=0.5)
        (layer,) = upcycle_in_place(
            model, router=ROUTER, experts=EXPERTS, blocks=(3,), kind=drop, seed=seed
        )
        kept = (layer.feed_forward.experts.up.transpose(1, 2) == fc1).all(dim=-1)
        assert kept.sum(dim=1).tolist() == [32] * 4, "of 64 hidden units of each expert"
        units.append(layer.feed_forward.experts.up)
    assert torch.equal(units[0], units[1]) and not torch.equal(units[0], units[2])


def test_blocks_are_chosen_as_in_a_method_and_its_state_is_a_torch_models():
    model, other = timm_model(), timm_model()
    for one in (model, other):
        upcycle_in_place(one, router=ROUTER, experts=EXPERTS, blocks="every_2")
    kinds = [type(block.mlp).__name__ for block in model.blocks]
    assert kinds == ["Mlp", "MoELayer", "Mlp", "MoELayer"]
    model.blocks[1].mlp.feed_forward.router.weight.data.normal_()
    other.load_state_dict(model.state_dict())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({}, {"experts": Mlp(number=4, hidden_ratio=2)}, "upcycle: .* set experts.hidden_ratio"),
        ({}, {"experts": Mlp(number=4, activation="relu")}, "experts.activation: found relu"),
        ({}, {"blocks": (4,)}, r"blocks: \[4\]"),
        ({}, {"blocks": "some"}, "blocks: found some"),
        ({}, {"router": Hash()}, "router: found hash, which reads patches"),
        ({}, {"kind": Granular(pieces=2)}, "router.noise_std: found 1, which breaks ties"),
        ({"proj_drop_rate": 0.1}, {}, "upcycle: found an mlp with dropout"),
        ({"act_layer": nn.SiLU}, {}, "upcycle: found an mlp with the activation SiLU"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(changes, settings, problem):
    model = timm_model(**changes)
    with pytest.raises(UserError, match=f"^{problem}"):
        upcycle_in_place(model, **{"router": ROUTER, "experts": EXPERTS} | settings)
    assert not any(isinstance(module, MoELayer) for module in model.modules())


def test_only_dense_foreign_models_are_upcycled():
    model = timm_model()
    upcycle_in_place(model, router=ROUTER, experts=EXPERTS)
    for other, problem in (
        (model, "a chosen block has experts already"),
        (vit(None), "a model of moecore is not changed in place"),
        (nn.Linear(2, 2), "Linear has no block with an mlp"),
    ):
        with pytest.raises(UserError, match=f"^upcycle: {problem}"):
            upcycle_in_place(other, router=ROUTER, experts=EXPERTS)


def test_the_loss_is_the_weighted_sum_and_a_regularizer_alone_is_not_weighted():
    layer = MoELayer(8, ROUTER, EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
    parts = [Importance(weight=0.5), ZLoss(weight=3.0), GroupSparsity(weight=0.0)]
    alone = [routing_loss(records, [part.model_copy(update={"weight": 1.0})]) for part in parts]
    torch.testing.assert_close(routing_loss(records, parts), 0.5 * alone[0] + 3.0 * alone[1])


def test_what_a_router_adds_by_itself_is_part_of_the_loss():
    layer = MoELayer(8, Depth(share=0.5, sampling="bce", sampling_weight=2.0), EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
        layer(torch.randn(3, 8))
    importance = routing_loss([one.with_penalty(None) for one in records], [Importance()])
    penalty = records[0].penalty.mean() + records[1].penalty.mean()
    assert penalty > 1
    torch.testing.assert_close(routing_loss(records, [Importance()]), importance + penalty)
    routing_loss(records, []).backward()
    assert layer.feed_forward.router.weight.grad.any()


def test_regularizers_that_need_more_than_records_are_refused():
    layer = MoELayer(8, Hash(by="position"), EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
    with pytest.raises(UserError, match="found jensen_shannon, which needs two_views"):
        routing_loss(records, [JensenShannon()])

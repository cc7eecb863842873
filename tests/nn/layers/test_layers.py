"""Soft attention weights, resized position embeddings, stochastic depth, and a model whose choices
are softened.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moecore.nn.layers.block import Attention, Block, DropPath, Mlp, attend, drop_rates
from moecore.nn.layers.patch_embed import resize_positions
from moecore.nn.layers.smooth import softened
from moecore.training.teachers.torchvision_operators import define_missing_operators
from tests.attacks.models import vit


def test_explicit_attention_equals_the_fused_kernel_with_gradients():
    query, key, value = (torch.randn(2, 3, 7, 5, requires_grad=True) for _ in range(3))
    ours = attend(query, key, value)
    theirs = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(ours, theirs)
    for mine, reference in zip(
        torch.autograd.grad(ours.square().sum(), (query, key, value)),
        torch.autograd.grad(theirs.square().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads"):
        Attention(10, 3)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_special_tokens_stay_and_a_constant_grid_stays_constant(mode):
    positions = torch.cat([torch.full((1, 2, 4), 7.0), torch.full((1, 9, 4), 3.0)], dim=1)
    resized = resize_positions(positions, prefix=2, size=(5, 5), mode=mode)
    assert resized.shape == (1, 27, 4)
    torch.testing.assert_close(resized[:, :2], positions[:, :2])
    torch.testing.assert_close(resized[:, 2:], torch.full((1, 25, 4), 3.0))


def test_a_row_gradient_runs_along_rows():
    # a 2×2 grid holding 0, 0 / 1, 1; bilinear to 4×4 with half-pixel centres: rows at 0, 1/4, 3/4,
    # 1
    positions = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 4, 1)
    resized = resize_positions(positions, prefix=0, size=(4, 4)).view(4, 4)
    torch.testing.assert_close(
        resized, torch.tensor([0.0, 0.25, 0.75, 1.0]).view(4, 1).expand(4, 4)
    )


def test_the_same_size_is_untouched_and_no_square_is_refused():
    positions = torch.randn(1, 5, 3)
    assert resize_positions(positions, prefix=1, size=(2, 2)) is positions
    with pytest.raises(ValueError, match="square"):
        resize_positions(torch.randn(1, 6, 3), prefix=1, size=(2, 2))


def images(number: int = 3) -> torch.Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_equals_the_true_model_where_all_experts_are_chosen():
    model = vit({"kind": "noisy_top_k", "k": 3})
    assert torch.allclose(
        softened(model)(images()).prediction, model(images()).prediction, atol=1e-5
    )
    fewer = vit({"kind": "noisy_top_k", "k": 1})
    assert not torch.allclose(
        softened(fewer)(images()).prediction, fewer(images()).prediction, atol=1e-2
    )


def test_a_layer_is_the_weighted_sum_of_all_experts():
    model = vit({"kind": "noisy_top_k", "k": 1})
    layer = softened(model).blocks[0].mlp
    tokens = torch.randn(2, 5, 16)
    found, (record,) = layer(tokens)
    experts = layer.experts
    each = [
        torch.nn.functional.gelu(tokens @ experts.up[e] + experts.up_bias[e]) @ experts.down[e]
        + experts.down_bias[e]
        for e in range(3)
    ]
    probs = torch.softmax(tokens @ model.blocks[0].mlp.router.weight.T, dim=-1)
    assert torch.allclose(found, sum(probs[..., e : e + 1] * each[e] for e in range(3)), atol=1e-5)
    assert record.chosen.all() and torch.equal(record.combine, record.probs)


def test_shares_the_weights_and_leaves_the_model_alone():
    model = vit({"kind": "noisy_top_k", "k": 1})
    before = model(images()).prediction
    soft = softened(model)
    assert {id(parameter) for parameter in soft.parameters()} == {
        id(parameter) for parameter in model.parameters()
    }
    assert (
        torch.equal(model(images()).prediction, before)
        and type(model.blocks[0].mlp.router).__name__ == "NoisyTopKRouter"
    )
    assert soft.training == model.training


def test_the_gradient_goes_through_every_expert():
    soft = softened(vit({"kind": "noisy_top_k", "k": 1}))
    soft(images()).prediction.square().sum().backward()
    grads = soft.blocks[1].mlp.experts.up.grad
    assert (grads.abs().sum(dim=(1, 2)) > 0).all()
    soft.zero_grad(set_to_none=True)


ROUTERS = [
    {"kind": "soft_slots"},
    {"kind": "expert_choice"},
    {"kind": "hash"},
    {"kind": "top_k_softmax"},
    {"kind": "eigenbasis"},
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router["kind"])
def test_every_router_has_a_surrogate(router):
    model = vit(router)
    found = softened(model)(images()).prediction
    assert torch.isfinite(found).all()
    if router["kind"] == "soft_slots":
        assert torch.equal(found, model(images()).prediction)


def test_a_branch_is_dropped_for_whole_samples_and_keeps_its_expectation():
    torch.manual_seed(0)
    found = DropPath(0.25).train()(torch.ones(20_000, 3, 2))
    each = found[:, :1, :1]
    assert torch.equal(found, each.expand_as(found))  # one draw a sample
    assert torch.equal(each.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert found.mean().item() == pytest.approx(1, abs=0.02)  # standard error 0.004


def test_in_evaluation_nothing_is_dropped():
    tokens = torch.randn(4, 3, 2)
    assert DropPath(0.9).eval()(tokens) is tokens


def test_under_autocast_the_scale_is_not_rounded():
    # 1 / 0.9 in bfloat16 would be 1.109375
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = DropPath(0.1).train()(torch.ones(100, 1, 1, dtype=torch.bfloat16))
    assert found.max().item() == pytest.approx(1 / 0.9, rel=1e-6)


def test_rates_rise_in_equal_steps_and_equal_timms():
    assert drop_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    for depth in (1, 2, 12):
        assert drop_rates(0.1, depth) == pytest.approx(torch.linspace(0, 0.1, depth).tolist())


def test_both_branches_of_a_block_drop_as_timms_do():
    ours = Block(8, Attention(8, 2), Mlp(8, 16), drop_path=0.5).train()
    define_missing_operators()
    from timm.models.vision_transformer import Block as Theirs

    theirs = Theirs(8, 2, mlp_ratio=2, qkv_bias=True, drop_path=0.5).train()
    theirs.norm1.eps = theirs.norm2.eps = 1e-6
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(64, 3, 8)
    torch.manual_seed(3)
    found = ours(tokens)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(found, theirs(tokens))
    untouched = (found == tokens).flatten(1).all(dim=1)
    assert 0 < untouched.sum() < 64  # where both branches were left out

"""The whole layer against a loop over experts with boolean masks."""

import pytest
import torch
from pydantic import ValidationError
from torch.func import functional_call, grad
from torch.nn.functional import gelu

from moecore.core.files import UserError
from moecore.nn.experts import Mlp
from moecore.nn.layers.moe import MoE
from moecore.nn.routers import NoisyTopK


def layer_of(width=8, experts=4, seed=0, hidden_ratio=4.0, **router):
    torch.manual_seed(seed)
    layer = MoE(
        router=NoisyTopK(**router), experts=Mlp(number=experts, hidden_ratio=hidden_ratio)
    ).build(width)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def mask_loop(layer, tokens):
    """The slow oracle: every expert computes the tokens that a boolean mask picks; weights from the
    record.
    """
    combine = layer.router(tokens)[1].combine
    outputs = torch.zeros_like(tokens)
    experts = layer.experts
    for expert in range(combine.shape[-1]):
        chosen = combine[..., expert] > 0
        hidden = gelu(tokens[chosen] @ experts.up[expert] + experts.up_bias[expert])
        answer = hidden @ experts.down[expert] + experts.down_bias[expert]
        outputs[chosen] = outputs[chosen] + combine[..., expert][chosen].unsqueeze(-1) * answer
    return outputs


def gradients(layer, tokens, forward, seed=3):
    torch.manual_seed(seed)  # the same noise for both
    outputs = forward(tokens)
    towards = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(9))
    return outputs, torch.autograd.grad(
        outputs, [tokens, *layer.parameters()], towards.to(outputs.dtype)
    )


SETTINGS = [
    {"k": 1},
    {"k": 2},
    {"k": 4},
    {"k": 2, "capacity_factor": 0.5},
    {"k": 2, "capacity_factor": 0.5, "batch_priority": True, "group_size": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "width, hidden_ratio", [(8, 4.0), (6, 1.5)]
)  # grouped_mm, and the fallback
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_all_gradients_agree_with_the_mask_loop(
    settings, width, hidden_ratio, training
):
    layer = layer_of(width, hidden_ratio=hidden_ratio, **settings).train(training)
    tokens = torch.randn(3, 7, width, requires_grad=True)
    actual, ours = gradients(layer, tokens, lambda x: layer(x)[0])
    expected, theirs = gradients(layer, tokens, lambda x: mask_loop(layer, x))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_an_expert_that_nobody_chooses_gets_a_gradient_of_zeros():
    layer = layer_of(k=1).eval()
    with torch.no_grad():
        layer.router.weight[2] = 0
        layer.router.weight[0] = 5
    outputs, _ = layer(torch.rand(2, 5, 8) + 0.5)  # all positive: expert 0 wins everywhere
    outputs.sum().backward()
    for parameter in layer.experts.parameters():
        assert parameter.grad[0].any()
        assert torch.equal(parameter.grad[2], torch.zeros_like(parameter[2]))


def test_permuted_tokens_give_permuted_outputs():
    layer = layer_of(k=2).eval()
    tokens = torch.randn(2, 9, 8)
    order = torch.randperm(9)
    torch.testing.assert_close(layer(tokens[:, order])[0], layer(tokens)[0][:, order])


def test_a_dropless_prediction_does_not_depend_on_its_batch():
    layer = layer_of(k=2, capacity_factor=0.25).eval()
    tokens = torch.randn(4, 9, 8)
    torch.testing.assert_close(layer(tokens[:1])[0], layer(tokens)[0][:1])


def test_a_token_without_any_seat_comes_back_as_zero():
    layer = layer_of(k=1, capacity_factor=0.1, noise_std=0.0)
    outputs, (record,) = layer(torch.randn(2, 20, 8))
    dropped = ~(record.combine > 0).any(-1)
    assert dropped.any() and not outputs[dropped].any() and outputs[~dropped].any(-1).all()


def test_bf16_autocast_stays_close_to_fp32_and_routes_alike():
    layer = layer_of(32, k=2).eval()
    tokens = torch.randn(4, 20, 32, requires_grad=True)
    expected, theirs = gradients(layer, tokens, lambda x: layer(x)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, (record,) = layer(tokens)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(record.combine, layer(tokens)[1][0].combine)
    assert (actual - expected).norm() < 0.02 * expected.norm()
    towards = torch.randn(actual.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    for mine, other in zip(
        torch.autograd.grad(actual, [tokens, *layer.parameters()], towards), theirs, strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() < 0.03 * other.norm()


def test_training_twice_from_the_same_seed_is_bit_equal():
    layer = layer_of(k=2, capacity_factor=1.0)
    tokens = torch.randn(4, 20, 8, requires_grad=True)
    first, second = (gradients(layer, tokens, lambda x: layer(x)[0])[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_functional_transforms_see_the_same_gradient():
    layer = layer_of(k=2).eval()
    tokens = torch.randn(2, 5, 8)
    parameters = dict(layer.named_parameters())
    loss = lambda parameters: functional_call(layer, parameters, (tokens,))[0].square().mean()
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for ours, theirs in zip(grad(loss)(parameters).values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_double_precision_gradients():
    layer = layer_of(4, hidden_ratio=1.0, k=2).double().eval()
    assert torch.autograd.gradcheck(
        lambda x: layer(x)[0], torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    )


def test_one_record_per_layer_in_fp32():
    layer = layer_of(k=2)
    outputs, records = layer(torch.randn(2, 5, 8))
    assert outputs.shape == (2, 5, 8) and len(records) == 1
    assert all(field.shape == (2, 5, 4) for field in records[0])


def test_an_empty_batch_passes_through():
    outputs, records = layer_of(k=2, capacity_factor=None)(torch.randn(0, 5, 8, requires_grad=True))
    outputs.sum().backward()
    assert outputs.shape == (0, 5, 8) and records[0].probs.shape == (0, 5, 4)


def moe(blocks):
    return MoE(router=NoisyTopK(), experts=Mlp(), blocks=blocks)


def test_blocks():
    assert moe("every_2").indices(6) == (1, 3, 5)
    assert moe("last_2").indices(8) == (5, 7)  # "6, 8" of 8 blocks, counted from 1
    assert moe("last_2").indices(7) == (3, 5)
    assert moe([7, 9, 11]).indices(12) == (7, 9, 11)
    assert moe([3, 1]).indices(4) == (1, 3)


@pytest.mark.parametrize(
    "blocks, depth", [("last_2", 3), ("every_2", 1), ([4], 4), ([-1], 4), ([1, 1], 4), ([], 4)]
)
def test_blocks_that_a_model_lacks_are_refused(blocks, depth):
    with pytest.raises(UserError, match=f"{depth} blocks"):
        moe(blocks).indices(depth)


def test_unknown_placements_are_refused():
    with pytest.raises(ValidationError):
        moe("last_3")

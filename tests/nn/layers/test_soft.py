import pytest
import torch

from moecore.nn.layers.soft import softened
from tests.attacks.models import vit


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

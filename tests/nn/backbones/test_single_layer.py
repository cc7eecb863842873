"""The model of MoGE's study: one token, one layer, one classifier."""

import pytest
import torch
from torch.nn.functional import gelu

from moecore.core.files import UserError
from moecore.core.records import Guidance, Layout, RoutingContext
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.layers.moe import MoE
from moecore.tasks.classification import Classification

IMAGE = ImageSpec(
    channels=2,
    size=4,
    task=Classification(classes=tuple("abc")),
    mean=(0.5, 0.25),
    std=(0.5, 0.125),
)
ROUTER = {"kind": "noisy_top_k", "k": 1}


def moe(**settings) -> MoE:
    return MoE(
        **(
            {
                "router": ROUTER,
                "experts": {"kind": "mlp", "number": 4, "hidden_ratio": 0.25},
                "blocks": [0],
            }
            | settings
        )
    )


def model(**settings):
    torch.manual_seed(0)
    built = SingleLayer(hidden=5).build(IMAGE, moe(**settings)).eval()
    for parameter in built.parameters():  # biases start at 0, where a mistake would not show
        parameter.data += 0.3 * torch.randn_like(parameter)
    return built


def normalised(images: torch.Tensor) -> torch.Tensor:
    """(B, 32): channel by channel, row by row."""
    return torch.cat(
        [(images[:, 0].flatten(1) - 0.5) / 0.5, (images[:, 1].flatten(1) - 0.25) / 0.125], dim=1
    )


def test_the_experts_output_times_its_gate_goes_straight_into_the_classifier():
    images = torch.rand(6, 2, 4, 4)
    built = model()
    experts = built.mlp.experts
    expected = []
    for pixels in normalised(images):
        gates = torch.softmax(built.mlp.router.weight @ pixels, dim=0)
        best = int(gates.argmax())
        hidden = gelu(pixels @ experts.up[best] + experts.up_bias[best])
        assert hidden.shape == (8,), "a quarter of the 32 pixels"
        # no residual, no norm
        output = gates[best] * (hidden @ experts.down[best] + experts.down_bias[best])
        expected.append(built.head.weight @ output + built.head.bias)
    found = built(images)
    torch.testing.assert_close(found.prediction, torch.stack(expected))
    assert len(found.heads) == 1 and torch.equal(found.heads[0], found.prediction)
    assert len(found.routing) == 1 and all(field.shape == (6, 1, 4) for field in found.routing[0])


def test_a_dense_model_has_one_mlp_and_no_records():
    torch.manual_seed(0)
    built = SingleLayer(hidden=5).build(IMAGE)
    images = torch.rand(3, 2, 4, 4)
    output = built(images)
    hidden = gelu(normalised(images) @ built.mlp.fc1.weight.T + built.mlp.fc1.bias)
    assert output.routing == () and hidden.shape == (3, 5) and built.moe is None
    torch.testing.assert_close(output.prediction, built.head(built.mlp.fc2(hidden)))


def test_the_papers_sizes():
    """400 experts 784 → 64 → 784 (§2.4): 784·64 + 64 + 64·784 + 784 = 101,200 parameters each, a
    router 400·784, a head 784·10 + 10.
    """
    image = ImageSpec(
        channels=1,
        size=28,
        task=Classification(classes=tuple("0123456789")),
        mean=(0.3,),
        std=(0.3,),
    )
    with torch.device("meta"):
        built = SingleLayer().build(
            image, moe(experts={"kind": "mlp", "number": 400, "hidden_ratio": 64 / 784})
        )
    assert (
        sum(parameter.numel() for parameter in built.parameters())
        == 400 * 101_200 + 400 * 784 + 7_850
    )
    assert built.width == 784 and built.config.depth == built.depth == 1


def test_where_its_token_lies():
    assert model().layout == Layout(special=0, grid=(1, 1), size=(4, 4))


def test_features_are_what_enters_and_leaves_the_layer():
    images = torch.rand(3, 2, 4, 4)
    built = model()
    tokens, records, (entering,) = built.encode(images, "mlp_input", (0,))
    torch.testing.assert_close(entering[:, 0], normalised(images))
    torch.testing.assert_close(built.mlp(entering)[0], tokens)
    for at in ("block_out", "final"):
        assert torch.equal(built.encode(images, at, (0,))[2][0], tokens)
    assert built.encode(images)[2] == () and len(records) == 1
    torch.testing.assert_close(built.predict(tokens), built(images).prediction)
    assert torch.equal(built.heads(tokens)[0], built.predict(tokens))
    with pytest.raises(UserError, match="the only block"):
        built.encode(images, "final", (1,))


def test_images_are_predicted_one_by_one():
    images = torch.rand(4, 2, 4, 4)
    built = model()
    torch.testing.assert_close(
        torch.cat([built(image[None]).prediction for image in images]), built(images).prediction
    )


def test_a_gradient_reaches_every_used_part():
    built = model().train()
    built(torch.rand(16, 2, 4, 4)).prediction.square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in built.parameters()
    )


def test_only_its_only_block_may_hold_experts():
    for blocks in ("last_2", "every_2", [1]):
        with pytest.raises(UserError, match="1 blocks"):
            SingleLayer().build(IMAGE, moe(blocks=blocks))


class Asking(torch.nn.Module):
    """A layer that keeps the context it was given."""

    def forward(self, tokens, context):
        self.context = context
        return tokens, ()


def test_a_router_gets_what_it_asks_for(monkeypatch):
    images = torch.rand(3, 2, 4, 4)
    teacher = torch.rand(3, 1, 4).softmax(-1)
    built = model()
    built.mlp = Asking()
    built(images, Guidance(torch.rand(3, 3), (teacher,)), 0.25)
    assert built.mlp.context == RoutingContext(progress=0.25)
    monkeypatch.setattr(type(built.moe.router), "wants", frozenset({"patches", "teacher"}))
    built(images, Guidance(torch.rand(3, 3), (teacher,)))
    assert torch.equal(built.mlp.context.patches, images.flatten(1)[:, None]) and torch.equal(
        built.mlp.context.teacher, teacher
    )
    assert built.mlp.context.progress == 1.0 and built.mlp.context.attention is None


def test_a_router_that_reads_attention_is_refused(monkeypatch):
    settings = moe()
    monkeypatch.setattr(type(settings.router), "wants", frozenset({"attention"}))
    with pytest.raises(
        UserError, match="single_layer has no attention, but the router noisy_top_k reads attention"
    ):
        SingleLayer().build(IMAGE, settings)

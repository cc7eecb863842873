import pytest

from moecore.training.method import Method
from moecore.training.optimizer import build_optimizer, learning_rate
from moecore.training.settings import Training
from tests.training.small import task

SETTINGS = Training(epochs=1, batch=1, learning_rate=1.0, final_learning_rate=0.2, weight_decay=0.3)


def test_rates_by_hand():
    # 3 warm-up steps: 1/4, 2/4, 3/4; then cosine over 4 steps: full, and half way (1 + 0.2) / 2
    rates = [learning_rate(step, 7, 3, SETTINGS) for step in range(7)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[5] == pytest.approx(0.6)
    assert rates[6] == pytest.approx(0.2 + 0.8 * (1 - 2**-0.5) / 2)


def test_only_matrices_decay():
    model = task().model
    optimizer = build_optimizer(model, SETTINGS)
    decayed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    names = {name: id(parameter) in decayed for name, parameter in model.named_parameters()}
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert [optimizer.param_groups[index]["weight_decay"] for index in (0, 1)] == [0.3, 0.0]
    assert (
        names["blocks.0.attn.qkv.weight"]
        and names["blocks.1.mlp.experts.up"]
        and names["blocks.1.mlp.router.weight"]
    )
    for free in (
        "cls_token",
        "pos_embed",
        "head.bias",
        "norm.weight",
        "blocks.1.mlp.experts.up_bias",
        "blocks.0.norm1.bias",
    ):
        assert not names[free], free


def test_no_decay_on_an_experts_basis():
    eigen = Method(
        router={"kind": "eigenbasis", "context": "learned"}, experts={"kind": "eigen", "number": 4}
    )
    made = task(eigen)
    free = {
        id(parameter)
        for parameter in build_optimizer(made.model, SETTINGS).param_groups[1]["params"]
    }
    held = {
        name.rpartition(".")[2]
        for name, parameter in made.model.named_parameters()
        if id(parameter) in free
    }
    assert {"basis", "scale", "target", "up_bias", "pos_embed"} <= held and "up" not in held

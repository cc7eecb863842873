"""A model in a folder.

Sparse upcycling: a dense checkpoint becomes a mixture of experts.
"""

import json
import os

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.tasks.classification import Classification
from moecore.training.artifacts import load_card, load_model, save_model, transferred
from moecore.training.method import Method
from moecore.training.upcycle import upcycle
from tests.training.small import IMAGE, VMOE


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE, VMOE.moe).eval()


def test_saved_and_loaded_it_says_the_same(tmp_path, model):
    save_model(tmp_path, model)
    images = torch.rand(3, 1, 8, 8)
    prediction, routing, _ = load_model(tmp_path)(images)
    assert torch.equal(prediction, model(images).prediction)
    assert len(routing) == 2 and torch.equal(routing[0].combine, model(images).routing[0].combine)
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", "model.safetensors"}


def test_loading_leaves_the_global_draws_as_they_were(tmp_path, model):
    save_model(tmp_path, model)
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    load_model(tmp_path)
    assert torch.rand(3).equal(undisturbed)


def test_at_another_resolution_with_other_classes(tmp_path, model):
    save_model(tmp_path, model)
    image = IMAGE.model_copy(update={"size": 16, "task": Classification(classes=("a", "b", "c"))})
    larger = transferred(tmp_path, image, VMOE.moe)
    assert larger(torch.rand(2, 1, 16, 16)).prediction.shape == (2, 3)
    assert larger.pos_embed.shape == (1, 17, 16) and torch.equal(
        larger.pos_embed[:, 0], model.pos_embed[:, 0]
    )
    assert torch.equal(larger.blocks[1].mlp.experts.up, model.blocks[1].mlp.experts.up)


def test_the_same_images_give_the_same_model(tmp_path, model):
    save_model(tmp_path, model)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(
        transferred(tmp_path, IMAGE, VMOE.moe).eval()(images).prediction, model(images).prediction
    )


def test_fine_tuning_keeps_the_drop_path_and_an_older_card_has_none(tmp_path, model):
    torch.manual_seed(0)
    dropping = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.3).build(IMAGE, VMOE.moe)
    save_model(tmp_path, dropping)
    tuned = transferred(tmp_path, IMAGE.model_copy(update={"size": 16}), VMOE.moe)
    assert tuned.config.drop_path == 0.3
    assert [block.drop_path1.rate for block in tuned.blocks[1:]] == pytest.approx([0.1, 0.2, 0.3])
    card = json.loads((tmp_path / "model.json").read_text())
    del card["backbone"]["drop_path"]
    (tmp_path / "model.json").write_text(json.dumps(card))
    assert load_card(tmp_path).backbone.drop_path == 0
    images = torch.rand(3, 1, 8, 8)
    expected = dropping.eval()(images).prediction
    assert torch.equal(load_model(tmp_path)(images).prediction, expected)


def test_what_does_not_fit_is_refused(tmp_path, model):
    save_model(tmp_path, model)
    with pytest.raises(UserError, match="1 channels, the new images have 3"):
        transferred(
            tmp_path,
            IMAGE.model_copy(update={"channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3}),
            VMOE.moe,
        )
    with pytest.raises(UserError, match="do not fit the model"):
        transferred(tmp_path, IMAGE, None)


def test_damaged_files_are_named(tmp_path, model):
    with pytest.raises(UserError, match="model.json"):
        load_card(tmp_path)
    save_model(tmp_path, model)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(UserError, match="model.safetensors"):
        load_model(tmp_path)
    card = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(card | {"unknown": 1}))
    with pytest.raises(UserError, match=r"(?s)model\.json.*unknown"):
        load_card(tmp_path)


VIT = Vit(patch=4, width=16, depth=4, heads=2, mlp_ratio=2)


def models(renormalise=True, ratio=2.0, image=IMAGE, experts="mlp", k=2):
    torch.manual_seed(0)
    dense = VIT.build(IMAGE)
    for parameter in dense.parameters():  # away from zero biases and small weights
        torch.nn.init.normal_(parameter, std=0.2)
    router = {"kind": "noisy_top_k", "k": k, "renormalise": renormalise}
    return dense.eval(), VIT.build(
        image, MoE(router=router, experts={"kind": experts, "number": 4, "hidden_ratio": ratio})
    ).eval()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_with_normalised_weights_the_function_starts_unchanged(k):
    dense, sparse = models(k=k)
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(
        upcycle(sparse, dense)(images).prediction, dense(images).prediction, atol=1e-5, rtol=1e-5
    )


def test_without_them_it_shrinks_the_experts_output():
    dense, sparse = models(renormalise=False)
    images = torch.rand(3, 1, 8, 8)
    assert (upcycle(sparse, dense)(images).prediction - dense(images).prediction).abs().max() > 1e-3


def test_every_expert_is_the_dense_mlp_and_the_router_is_new():
    dense, sparse = models()
    router = sparse.blocks[1].mlp.router.weight.clone()
    upcycle(sparse, dense)
    experts = sparse.blocks[3].mlp.experts
    for expert in range(4):
        assert torch.equal(experts.up[expert], dense.blocks[3].mlp.fc1.weight.t()) and torch.equal(
            experts.up_bias[expert], dense.blocks[3].mlp.fc1.bias
        )
        assert torch.equal(
            experts.down[expert], dense.blocks[3].mlp.fc2.weight.t()
        ) and torch.equal(experts.down_bias[expert], dense.blocks[3].mlp.fc2.bias)
    assert torch.equal(sparse.blocks[1].mlp.router.weight, router)


def test_noise_makes_the_experts_unlike_and_leaves_the_rest():
    dense, sparse = models()
    torch.manual_seed(3)
    upcycle(sparse, dense, noise=0.1)
    experts = sparse.blocks[3].mlp.experts
    copied = dense.blocks[3].mlp.fc1.weight.t()
    changes = experts.up - copied
    assert torch.allclose(changes.std(dim=(1, 2)) / copied.std(), torch.tensor(0.1), rtol=0.2)
    assert not torch.equal(changes[0], changes[1])
    assert torch.equal(experts.up_bias[1], dense.blocks[3].mlp.fc1.bias)
    assert torch.equal(sparse.blocks[0].mlp.fc1.weight, dense.blocks[0].mlp.fc1.weight)


def test_noise_without_upcycling_is_refused():
    with pytest.raises(ValidationError, match="upcycle_noise is 0.1, but upcycle is false"):
        Method(upcycle_noise=0.1)


def test_other_classes_get_a_fresh_head_and_other_sizes_new_positions():
    dense, sparse = models(
        image=IMAGE.model_copy(update={"task": Classification(classes=("a", "b", "c")), "size": 16})
    )
    head = sparse.head.weight.clone()
    upcycle(sparse, dense)
    assert torch.equal(sparse.head.weight, head) and torch.equal(sparse.cls_token, dense.cls_token)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"ratio": 1.0}, "hidden width 32"), ({"experts": "eigen"}, "experts of kind mlp only")],
)
def test_what_cannot_be_upcycled_is_refused(settings, said):
    dense, sparse = models(**settings)
    with pytest.raises(UserError, match=said):
        upcycle(sparse, dense)


def test_a_teacher_of_another_width_is_refused():
    with pytest.raises(UserError, match="in the teacher"):
        upcycle(VIT.build(IMAGE), VIT.model_copy(update={"width": 24}).build(IMAGE))

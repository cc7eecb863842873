"""A model in a folder."""

import json
import os

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.vit import Vit
from moecore.tasks.classification import Classification
from moecore.training.artifacts import load_card, load_model, save_model, transferred
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

"""Our vision transformer against timm's, with timm's own random weights.

What a model knows of its images, from cards of images and of volumes.
"""

import pytest
import torch
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.tasks.classification import Classification
from moecore.tasks.regression import Regression
from moecore.training.teachers.timm import vit_settings
from moecore.training.teachers.torchvision_operators import define_missing_operators

IMAGE = ImageSpec(
    channels=3,
    size=32,
    task=Classification(classes=tuple("abcde")),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
)
SMALL = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 5,
}


def timm_model(**settings):
    define_missing_operators()
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    kind = VisionTransformerDistilled if settings.pop("distilled", False) else VisionTransformer
    model = kind(**SMALL, **settings).eval()
    for (
        parameter
    ) in model.parameters():  # timm starts some at 0 or 1, where a mistake would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"class_token": False, "global_pool": "avg"},
        {"distilled": True},
        {"no_embed_class": True, "init_values": 1e-6},
        {"qkv_bias": False},
    ],
    ids=["vit", "mean pooling", "deit distilled", "deit3", "no qkv bias"],
)
def test_dense_logits_equal_timms(settings):
    source = timm_model(**settings)
    model = vit_settings(source, "timm's").build(IMAGE)
    model.load_state_dict(source.state_dict())
    images = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE.mean, IMAGE.std))
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(images).prediction, source((images - mean) / std), atol=1e-4, rtol=0
        )


def test_a_dense_model_has_no_records_and_an_moe_model_one_per_layer():
    assert Vit(patch=8, width=48, depth=3).build(IMAGE)(torch.rand(2, 3, 32, 32)).routing == ()
    moe = MoE(
        router={"kind": "noisy_top_k", "k": 2}, experts={"kind": "mlp", "number": 4}, blocks=[0, 2]
    )
    routing = Vit(patch=8, width=48, depth=3).build(IMAGE, moe)(torch.rand(2, 3, 32, 32)).routing
    assert len(routing) == 2 and all(
        field.shape == (2, 17, 4) for record in routing for field in record
    )


def test_features_are_what_enters_and_leaves_a_block():
    model = Vit(patch=8, width=48, depth=3).build(IMAGE).eval()
    images = torch.rand(2, 3, 32, 32)
    tokens, _, (entering,) = model.encode(images, "mlp_input", (2,))
    _, _, (before,) = model.encode(images, "block_out", (1,))
    block = model.blocks[2]
    attended = before + block.attn(block.norm1(before))[0]
    torch.testing.assert_close(entering, block.norm2(attended))
    torch.testing.assert_close(tokens, model.norm(attended + block.mlp(entering)[0]))
    torch.testing.assert_close(model.encode(images, "final", (2,))[2][0], tokens)


@pytest.mark.parametrize(
    ("setting", "named"), [({"patch": 5}, "model.patch"), ({"width": 50}, "model.heads")]
)
def test_sizes_that_do_not_fit_are_named(setting, named):
    with pytest.raises(UserError, match=named):
        Vit(**({"patch": 8, "width": 48} | setting)).build(IMAGE)


VOLUMES = {
    "channels": 1,
    "size": [32, 48, 32],
    "mean": [0.4],
    "std": [0.2],
    "task": {"kind": "regression", "target": "age", "mean": 61.5, "deviation": 17.0},
    "name": "of no interest",
}
IMAGES = {
    "channels": 3,
    "size": 32,
    "mean": [0.4] * 3,
    "std": [0.2] * 3,
    "task": {"kind": "classification", "classes": ["cat", "dog"]},
}


def test_a_card_of_volumes_gives_three_axes_and_one_output():
    spec = ImageSpec.from_card(VOLUMES)
    assert spec.shape == (32, 48, 32)
    assert spec.outputs == 1
    assert spec.answers == ("age",)
    assert spec.task == Regression(target="age", mean=61.5, deviation=17.0)
    assert ImageSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_card_of_images_gives_two_axes_and_an_output_per_class():
    spec = ImageSpec.from_card(IMAGES)
    assert spec.shape == (32, 32)
    assert spec.outputs == 2
    assert spec.answers == ("cat", "dog")
    assert spec.task == Classification(classes=("cat", "dog"))


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"kind": "classification", "classes": ["one"]}},
        {"task": {"kind": "classification"}},
        {"task": {"kind": "captioning"}},
        {"task": {"kind": "regression", "target": "age", "deviation": 0.0}},
        {"task": {"kind": "regression"}},
        {"size": 0},
        {"size": [4, 4]},
        {"size": [4, 0, 4]},
    ],
)
def test_what_is_no_card_is_refused(change):
    with pytest.raises(ValidationError):
        ImageSpec.from_card(IMAGES | change)


def test_a_card_without_a_task_is_refused():
    with pytest.raises(KeyError, match="task"):
        ImageSpec.from_card({key: value for key, value in IMAGES.items() if key != "task"})

"""Sparse upcycling of each backbone: it begins as its dense teacher, or is refused."""

from functools import partial

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.backbones.sfcn import Sfcn
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.swin_moe import SwinMoe
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.backbones.text_tower import TextTowerSettings
from moecore.nn.backbones.two_towers import TwoTowers
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.layers.moe import MoESettings
from moecore.tasks.image_text import ImageText
from moecore.tasks.next_token import NextToken
from moecore.tasks.regression import Regression
from moecore.testing.check_helpers import IMAGE, draw_weights
from moecore.training.upcycle import upcycle_model

VOLUMES = IMAGE.model_copy(update={"size": (8, 8, 8)})
TEXT = ImageSpec(channels=2, size=(4,), mean=(0.0,) * 2, std=(1.0,) * 2, task=NextToken(words=11))
CAPTIONS = ImageText(words=20, context=7, captions=2, end=2, vocabulary="0" * 64)
CAPTIONED = IMAGE.model_copy(update={"task": CAPTIONS})
ROUTER = {"kind": "noisy_top_k", "k": 2, "renormalise": True}

# Another value of every setting, the teacher's; "kind" is always compared.
TRANSFORMER = {
    "patch": 2,
    "width": 32,
    "depth": 3,
    "heads": 4,
    "mlp_ratio": 1.0,
    "pooling": "mean",
    "position_on_class": False,
    "layer_scale": 0.1,
    "qkv_bias": False,
    "pre_norm": True,
    "activation": "quick_gelu",
    "norm_eps": 0.01,
    "drop_path": 0.1,
}
VOLUME_TRANSFORMER = {"stem": "conv", "pool": 2, "stem_width": 8, "positions": "sinusoidal"}
SWIN = {
    "patch": 1,
    "width": 32,
    "depths": (1, 2),
    "heads": (2, 4),
    "mlp_ratio": 1.0,
    "qkv_bias": False,
    "drop_path": 0.1,
}
LANGUAGE = {
    "width": 16,
    "depth": 3,
    "heads": 4,
    "span": 2,
    "layers": "momentum",
    "mlp_ratio": 1.0,
    "dropout": 0.1,
}
SINGLE = {"hidden": 64, "activation": "quick_gelu"}
TEXT_TOWER = {
    "width": 32,
    "depth": 3,
    "heads": 4,
    "mlp_ratio": 1.0,
    "mask": "full",
    "pooling": "class",
    "activation": "quick_gelu",
    "frozen": "always",
}
SMALL_VIT = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=2.0)
SMALL_SWIN = {"patch": 2, "width": 16, "depths": (2, 2), "heads": (2, 2), "window": 2}
SMALL_TEXT = TextTowerSettings(width=16, depth=2, heads=2, mlp_ratio=2.0)
BACKBONES = {
    "vit": (SMALL_VIT, IMAGE, TRANSFORMER),
    "vit3d": (
        Vit3d(patch=4, width=24, depth=2, heads=2, mlp_ratio=2.0),
        VOLUMES,
        VOLUME_TRANSFORMER,
    ),
    "swin": (Swin(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, SWIN),
    "swin_moe": (SwinMoe(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, {}),
    "swin_v2": (SwinV2(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, {}),
    "single_layer": (SingleLayer(hidden=128), IMAGE, SINGLE),
    "language_model": (
        LanguageModel(width=8, depth=2, heads=2, span=4, mlp_ratio=2.0, dropout=0.0),
        TEXT,
        LANGUAGE,
    ),
    "two_towers": (
        TwoTowers(image=SMALL_VIT, text=SMALL_TEXT, joint=6),
        CAPTIONED,
        {"joint": 8, "pairs": "sigmoid", "image.heads": 4, "image.drop_path": 0.1}
        | {f"text.{name}": value for name, value in TEXT_TOWER.items()},
    ),
}
CASES = [(name, key) for name, (_, _, others) in BACKBONES.items() for key in others]


def changed(config, key: str, value):
    """Return the settings with another value at a dotted key."""
    name, _, inner = key.partition(".")
    if inner:
        value = changed(getattr(config, name), inner, value)
    return config.model_copy(update={name: value})


def build(config, image: ImageSpec, is_sparse: bool = False) -> BackboneModel:
    """Return the model, dense or with experts in its last block."""
    torch.manual_seed(0)
    if not is_sparse:
        return config.build(image).eval()
    activation = "relu" if config.kind == "language_model" else "gelu"
    experts = {"kind": "mlp", "number": 4, "hidden_ratio": 2.0, "activation": activation}
    moe = MoESettings(router=ROUTER, experts=experts, blocks=(config.depth - 1,))
    if config.kind == "two_towers":
        config = changed(config, "text.moe", moe.model_copy(update={"blocks": (1,)}))
    return config.build(image, moe).eval()


def draw(model: BackboneModel) -> BackboneModel:
    """Draw weights that no norm or activation is blind to, the norms' and layer scales' too."""
    draw_weights(model, std=0.3)
    return model


def predictions(model: BackboneModel) -> torch.Tensor:
    """Return what a model says of inputs, and of captions where it reads some."""
    image = model.image
    torch.manual_seed(1)
    if isinstance(image.task, NextToken):
        return model(torch.randint(11, (3, 2, 4))).prediction
    output = model(torch.rand(3, image.channels, *image.shape)).prediction
    if not isinstance(image.task, ImageText):
        return output
    words = torch.randint(4, 20, (3, 1, 7))
    words[:, :, 0], words[:, :, 5] = 1, 2
    return torch.cat([output.flatten(), model.targets(words).flatten()])


@torch.no_grad()
def assert_begins_as(sparse: BackboneModel, dense: BackboneModel) -> None:
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    close(predictions(upcycle_model(sparse, dense)), predictions(dense))


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_model_begins_as_its_teacher_whose_pixels_were_normalised_otherwise(kind):
    config, image, _ = BACKBONES[kind]
    assert_begins_as(build(config, image, is_sparse=True), draw(build(config, image)))
    other = image.model_copy(update={"mean": (0.4,) * image.channels})
    dense = draw(build(config, other))
    if kind in ("single_layer", "language_model"):
        with pytest.raises(UserError, match=r"^upcycle: the teacher's pixels have means of \(0.4"):
            upcycle_model(build(config, image, is_sparse=True), dense)
    else:
        assert_begins_as(build(config, image, is_sparse=True), dense)


@pytest.mark.parametrize(("kind", "key"), CASES)
@pytest.mark.parametrize("is_the_teachers", [True, False])
def test_with_another_setting_it_begins_as_its_teacher_or_is_refused(kind, key, is_the_teachers):
    config, image, others = BACKBONES[kind]
    other = changed(config, key, others[key])
    ours, theirs = (config, other) if is_the_teachers else (other, config)
    dense, sparse = draw(build(theirs, image)), build(ours, image, is_sparse=True)
    try:
        assert_begins_as(sparse, dense)
    except UserError as error:
        assert str(error).startswith("upcycle: ") and "\n" not in str(error)
        assert key.rpartition(".")[2] not in ("drop_path", "dropout", "frozen")
    else:
        assert key.rpartition(".")[2] in type(_owner(config, key)).free_settings


def _owner(config, key: str):
    name, _, inner = key.partition(".")
    return getattr(config, name) if inner else config


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        (Vit, TRANSFORMER),
        (Vit3d, TRANSFORMER | VOLUME_TRANSFORMER),
        # of windows: tests/nn/backbones/test_swin.py
        *((kind, [*SWIN, "window", "pretrained_windows"]) for kind in (Swin, SwinMoe, SwinV2)),
        (SingleLayer, SINGLE),
        (LanguageModel, LANGUAGE),
        (TextTowerSettings, [*TEXT_TOWER, "moe"]),
        (TwoTowers, ["joint", "pairs", "image", "text"]),
    ],
)
def test_every_setting_of_a_backbone_is_tried(settings, tried):
    assert {*settings.model_fields} - {"kind"} == {*tried}


@torch.no_grad()
def test_the_text_tower_alone_may_have_experts():
    config, image, _ = BACKBONES["two_towers"]
    moe = build(config, image, is_sparse=True).config.text.moe
    assert_begins_as(build(changed(config, "text.moe", moe), image), draw(build(config, image)))


def test_a_text_tower_of_other_words_is_refused():
    config, image, _ = BACKBONES["two_towers"]
    other = CAPTIONS.model_copy(update={"vocabulary": "1" * 64})
    dense = build(config, image.model_copy(update={"task": other}))
    with pytest.raises(UserError, match="^upcycle: found other words: captions of 20 words"):
        upcycle_model(build(config, image, is_sparse=True), dense)


def test_a_dense_model_may_begin_as_its_teacher_alone():
    sizes = {"channels": (2, 3, 4), "bins": 3}
    dense = draw(Sfcn(**sizes).build(_ages(40.0, 10.0)))
    # whose bins have edges in years, whatever the labels' mean is
    model = upcycle_model(Sfcn(**sizes, dropout=0.0).build(_ages(60.0, 8.0)), dense)
    assert torch.equal(model.head.weight, dense.head.weight)
    with pytest.raises(UserError, match=r"^upcycle: found first_bin 10.0 in the model, 42.0 in"):
        upcycle_model(Sfcn(**sizes, first_bin=10.0).build(_ages(40.0, 10.0)), dense)


def _ages(mean: float, deviation: float) -> ImageSpec:
    task = Regression(target="age", mean=mean, deviation=deviation)
    return VOLUMES.model_copy(update={"task": task})


def test_a_head_of_the_same_target_says_it_of_another_cohort():
    config = Vit3d(patch=4, width=24, depth=2, heads=2, pooling="class+distillation", mlp_ratio=2.0)
    dense = draw(build(config, _ages(60.0, 8.0)))
    assert_begins_as(build(config, _ages(40.0, 10.0), is_sparse=True), dense)

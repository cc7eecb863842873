"""A timm checkpoint in the real format becomes our frozen teacher."""

import re

import pytest
import torch
from safetensors.torch import save_file

from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.tasks.classification import Classification
from moecore.training.teachers.timm import Timm
from moecore.training.teachers.torchvision_operators import define_missing_operators

NAME = "deit_tiny_patch16_224"
IMAGE = ImageSpec(
    channels=3,
    size=224,
    task=Classification(classes=("a", "b")),
    mean=(0.1, 0.1, 0.1),
    std=(1.0, 1.0, 1.0),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    define_missing_operators()
    import timm

    torch.manual_seed(0)
    source = timm.create_model(NAME, pretrained=False).eval()
    path = tmp_path_factory.mktemp("timm") / "deit.safetensors"
    save_file(source.state_dict(), path)
    return source, str(path)


def test_the_teacher_is_timms_model_with_timms_normalisation(checkpoint):
    source, path = checkpoint
    teacher = Timm(name=NAME, checkpoint=path).build(IMAGE)
    images = torch.rand(1, 3, 224, 224)
    mean, std = (
        torch.tensor(source.pretrained_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std")
    )
    with torch.no_grad():
        torch.testing.assert_close(
            teacher(images).prediction, source((images - mean) / std), atol=1e-4, rtol=0
        )


def test_another_resolution_and_grey_images(checkpoint):
    _, path = checkpoint
    grey = IMAGE.model_copy(update={"channels": 1, "size": 64, "mean": (0.1,), "std": (1.0,)})
    teacher = Timm(name=NAME, checkpoint=path).build(grey)
    assert teacher.pos_embed.shape == (1, 17, 192)
    assert teacher(torch.rand(2, 1, 64, 64)).prediction.shape == (2, 1000)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "no_such_model"}, "allowed: a timm model name"),
        (
            {"name": NAME, "checkpoint": "missing.safetensors"},
            "allowed: an existing .safetensors file",
        ),
        ({"name": NAME, "checkpoint": "weights.pth"}, "pickled checkpoints are not loaded"),
    ],
)
def test_what_cannot_be_a_teacher_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        Timm(**settings).build(IMAGE)


def test_an_architecture_that_is_no_plain_vit_is_refused():
    define_missing_operators()
    import timm

    from moecore.training.teachers.timm import vit_settings

    with pytest.raises(UserError, match="plain vision transformers"):
        vit_settings(timm.create_model("resnet10t", pretrained=False), "resnet10t")


SWIN = {
    "swin": "swin_tiny_patch4_window7_224",
    "swin_v2": "swinv2_tiny_window8_256",
}


def swin_checkpoint(kind: str):
    define_missing_operators()
    import timm

    torch.manual_seed(0)
    source = timm.create_model(SWIN[kind], pretrained=False, num_classes=1000).eval()
    for name, parameter in source.named_parameters():
        if "norm" in name:  # V2's start at 0
            parameter.data += 0.5
    return source


def microsofts(name: str) -> str:
    """The name of one of timm's weights in Microsoft's files."""
    name = name.replace("head.fc.", "head.")
    return re.sub(
        r"layers\.(\d+)\.downsample", lambda found: f"layers.{int(found[1]) - 1}.downsample", name
    )


@pytest.mark.parametrize("names", [str, microsofts])
@pytest.mark.parametrize("kind", SWIN)
def test_swin_is_read_with_timms_and_with_microsofts_names(tmp_path, kind, names):
    source = swin_checkpoint(kind)
    path = tmp_path / "swin.safetensors"
    state = source.state_dict()
    if names is microsofts:  # theirs hold what follows from the sizes, too
        state = {microsofts(name): value for name, value in state.items()}
        state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(2, 2)
    save_file(state, path)
    size = source.patch_embed.img_size[0]
    image = IMAGE.model_copy(update={"size": size})
    teacher = Timm(name=SWIN[kind], checkpoint=str(path)).build(image)
    pixels = torch.rand(1, 3, size, size)
    with torch.no_grad():
        expected = source(teacher.normalised(pixels))
        torch.testing.assert_close(teacher(pixels).prediction, expected, atol=1e-4, rtol=1e-4)
    if names is str:
        small = IMAGE.model_copy(update={"size": 64})
        other = Timm(name=SWIN[kind], checkpoint=str(path)).build(small)
        assert other(torch.rand(1, 3, 64, 64)).prediction.shape == (1, 1000)
        assert other.config.pretrained_windows == (None if kind == "swin" else (8, 8, 8, 8))


def test_a_file_of_another_model_is_refused_with_its_names(tmp_path):
    source = swin_checkpoint("swin")
    state = {name: value for name, value in source.state_dict().items() if "layers.3" not in name}
    path = tmp_path / "swin.safetensors"
    save_file(state, path)
    with pytest.raises(UserError, match=r"layers\.3\.downsample\.norm\.weight"):
        Timm(name=SWIN["swin"], checkpoint=str(path)).build(IMAGE)

"""A timm checkpoint in the real format becomes our frozen teacher."""

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

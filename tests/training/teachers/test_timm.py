"""What of timm's models ours lack is said in one line, before anything is downloaded."""

import pytest

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.meta_device import meta_device_context
from moecore.study.check import check_study
from moecore.tasks.classification import Classification
from moecore.training.teachers.timm import Timm
from tests.project import PARAMS

IMAGE = ImageSpec(
    channels=3, size=224, mean=(0.5,) * 3, std=(0.5,) * 3, task=Classification(classes=("a", "b"))
)
UNSUPPORTED = {
    "vit_small_patch14_reg4_dinov2": "register tokens",
    "vit_giant_patch14_dinov2": "gated feed-forwards (GluMlp), the activation SiLU",
    "vit_base_patch16_rope_224": "the architecture eva",
    "vit_base_patch32_clip_quickgelu_224": "a norm before the first block, the activation Quick",
    "vit_base_patch16_siglip_224": "the pooling map",
    "vit_small_patch16_18x2_224": "blocks of the kind ParallelThingsBlock",
    "swin_s3_tiny_224": "windows of different sizes",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_ours_lack_of_a_model_is_named(name):
    with meta_device_context(), pytest.raises(UserError) as refused:
        Timm(name=name, checkpoint="not_read.safetensors").check_name(IMAGE)
    said = str(refused.value)
    assert said.startswith(f"teacher.name: found {name}, which has ")
    assert UNSUPPORTED[name] in said and "; allowed: " in said and "\n" not in said


@pytest.mark.parametrize(
    "name",
    [
        "deit3_small_patch16_224",
        "deit_tiny_distilled_patch16_224.fb_in1k",
        "swinv2_tiny_window8_256",
    ],
)
def test_plain_models_are_taken(name):
    with meta_device_context():
        Timm(name=name).check_name(IMAGE)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.no_such_tag", "vit_small_patch32_clip_224"])
def test_names_without_weights_are_refused(name):
    with meta_device_context(), pytest.raises(UserError, match="^teacher.name: found "):
        Timm(name=name).check_name(IMAGE)


def test_the_check_of_a_study_names_file_line_and_key(tmp_path):
    before, _, after = PARAMS.partition("teacher:\n")
    teacher = "teacher: {kind: timm, name: vit_small_patch14_reg4_dinov2}\n"
    text = before + teacher + after[after.index("teacher_router") :]
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        check_study(tmp_path / "params.yaml")
    line = text[: text.index("teacher: {")].count("\n") + 1
    place = f"params.yaml:{line}:"
    said = str(refused.value)
    assert place in said and ": teacher.name: found vit_small_patch14_reg4_dinov2" in said
    assert "register tokens" in said and "\n" not in said

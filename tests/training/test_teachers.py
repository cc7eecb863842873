"""Checkpoints of open_clip and timm become towers and teachers; a trained teacher."""

import math
import re

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from moecore import Prepared, UserError
from moecore.nn.backbones.two_towers import TwoTowers
from moecore.nn.predict import meta_device_context
from moecore.parts import Classification, ImageSpec
from moecore.sources import Clusters, Digits
from moecore.study.check import check_study
from moecore.tasks.image_text import ImageText
from moecore.testing import check_teacher
from moecore.training.method import Method
from moecore.training.teachers.dense import Dense
from moecore.training.teachers.open_clip import MEAN, STD, OpenClip
from moecore.training.teachers.timm import Timm, define_missing_operators
from moecore.training.upcycle import copy_dense_into_moe
from tests.project import PARAMS

WIDTH, TEXT, JOINT, PATCH, WORDS, CONTEXT = 128, 64, 24, 8, 30, 9
TASK = ImageText(words=WORDS, context=CONTEXT, captions=2, end=29, vocabulary="0" * 64)
IMAGE = ImageSpec(channels=3, size=16, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), task=TASK)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    def draw_map(name: str, inputs: int, outputs: int, separator: str = ".") -> None:
        found[f"{name}{separator}weight"] = draw(outputs, inputs)
        found[f"{name}{separator}bias"] = draw(outputs)

    def draw_norm(name: str, width: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + draw(width), draw(width)

    found = {"logit_scale": torch.tensor(3.0), "visual.conv1.weight": draw(WIDTH, 3, PATCH, PATCH)}
    found |= {"visual.class_embedding": draw(WIDTH), "visual.positional_embedding": draw(5, WIDTH)}
    found |= {"visual.proj": draw(WIDTH, JOINT), "token_embedding.weight": draw(WORDS, TEXT)}
    found |= {"positional_embedding": draw(CONTEXT, TEXT), "text_projection": draw(TEXT, JOINT)}
    for name, width in (("visual.ln_pre", WIDTH), ("visual.ln_post", WIDTH), ("ln_final", TEXT)):
        draw_norm(name, width)
    for tower, width, depth in (("visual.", WIDTH, 3), ("", TEXT, 2)):
        for number in range(depth):
            block = f"{tower}transformer.resblocks.{number}"
            draw_norm(f"{block}.ln_1", width)
            draw_map(f"{block}.attn.in_proj", width, 3 * width, "_")
            draw_map(f"{block}.attn.out_proj", width, width)
            draw_norm(f"{block}.ln_2", width)
            draw_map(f"{block}.mlp.c_fc", width, 4 * width)
            draw_map(f"{block}.mlp.c_proj", 4 * width, width)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "open_clip_model.safetensors"
    save_file(weights(), path)
    return str(path)


def norm(values, weight, bias):
    mean = values.mean(-1, keepdim=True)
    variance = (values - mean).square().mean(-1, keepdim=True)
    return (values - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def transformer(hidden, given, start: str, depth: int, causal: bool, quick: bool):
    """One sequence (T, d) through blocks under open_clip's names; heads are 64 wide."""
    length, width = hidden.shape
    for number in range(depth):
        name = f"{start}transformer.resblocks.{number}"
        one = {key.removeprefix(f"{name}."): value for key, value in given.items()}
        inner = norm(hidden, one["ln_1.weight"], one["ln_1.bias"])
        inner = inner @ one["attn.in_proj_weight"].T + one["attn.in_proj_bias"]
        query, key, value = inner.chunk(3, dim=-1)
        parts = []
        for head in range(width // 64):
            own = slice(64 * head, 64 * head + 64)
            scores = query[:, own] @ key[:, own].T / 8
            if causal:
                scores = scores + torch.full((length, length), -math.inf).triu(1)
            parts.append(torch.softmax(scores, dim=-1) @ value[:, own])
        attended = torch.cat(parts, dim=-1)
        hidden = hidden + attended @ one["attn.out_proj.weight"].T + one["attn.out_proj.bias"]
        inner = norm(hidden, one["ln_2.weight"], one["ln_2.bias"])
        inner = inner @ one["mlp.c_fc.weight"].T + one["mlp.c_fc.bias"]
        gelu = torch.nn.functional.gelu(inner)
        inner = inner * torch.sigmoid(1.702 * inner) if quick else gelu
        hidden = hidden + inner @ one["mlp.c_proj.weight"].T + one["mlp.c_proj.bias"]
    return hidden


def clip_image(image, given, quick: bool):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    pixels = ((image - mean) / std)[None]
    patches = torch.nn.functional.conv2d(pixels, given["visual.conv1.weight"], stride=PATCH)
    tokens = torch.cat([given["visual.class_embedding"][None], patches[0].flatten(1).T])
    tokens = tokens + given["visual.positional_embedding"]
    tokens = norm(tokens, given["visual.ln_pre.weight"], given["visual.ln_pre.bias"])
    tokens = transformer(tokens, given, "visual.", 3, False, quick)
    first = norm(tokens[0], given["visual.ln_post.weight"], given["visual.ln_post.bias"])
    return first @ given["visual.proj"]


def clip_text(tokens, given, quick: bool):
    hidden = given["token_embedding.weight"][tokens] + given["positional_embedding"]
    hidden = transformer(hidden, given, "", 2, True, quick)
    hidden = norm(hidden, given["ln_final.weight"], given["ln_final.bias"])
    return hidden[tokens.argmax()] @ given["text_projection"]  # the end has the highest number


def captions(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.zeros(number, 1, CONTEXT, dtype=torch.int32)
    for row in found[:, 0]:
        words = int(torch.randint(1, CONTEXT - 2, (), generator=generator))
        row[0] = 28
        row[1 : 1 + words] = torch.randint(1, 28, (words,), generator=generator)
        row[1 + words] = 29
    return found


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@torch.no_grad()
def test_both_towers_are_clips(checkpoint, activation):
    model = OpenClip(checkpoint=checkpoint, activation=activation).build(IMAGE)
    given, quick = weights(), activation == "quick_gelu"
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    unit = normalize(torch.stack([clip_image(one, given, quick) for one in images]))
    sides = model(images).prediction
    torch.testing.assert_close(sides[:, :JOINT], math.exp(3) * unit, atol=1e-4, rtol=1e-4)
    words = captions(5)
    unit = normalize(torch.stack([clip_text(one[0].long(), given, quick) for one in words]))
    torch.testing.assert_close(model.targets(words)[:, 0, :JOINT], unit, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_experts_of_its_mlps_say_what_it_says_though_pixels_are_normalised_otherwise(checkpoint):
    teacher = OpenClip(checkpoint=checkpoint, activation="quick_gelu").build(IMAGE)
    experts = {"kind": "mlp", "number": 4, "hidden_ratio": 4, "activation": "quick_gelu"}
    router = {"kind": "noisy_top_k", "k": 2, "renormalise": True}
    entry = {"router": router, "experts": experts, "blocks": [1]}
    method = Method.model_validate(entry | {"text": entry, "upcycle": True})
    assert isinstance(teacher.config, TwoTowers)
    model = method.merge_model_settings(teacher.config).build(IMAGE, method.moe)
    copy_dense_into_moe(model, teacher)
    images = torch.rand(4, 3, 16, 16)
    found = model.eval()(images).prediction
    torch.testing.assert_close(found, teacher(images).prediction, atol=1e-3, rtol=1e-4)
    found, words = model.targets(captions(3)), teacher.targets(captions(3))
    torch.testing.assert_close(found, words, atol=1e-5, rtol=1e-4)
    other = entry | {"experts": entry["experts"] | {"activation": "gelu"}}
    wrong = Method.model_validate(other).merge_model_settings(teacher.config)
    with pytest.raises(UserError, match="has quick_gelu, experts.activation is gelu; set exp"):
        copy_dense_into_moe(wrong.build(IMAGE, Method.model_validate(other).moe), teacher)


def test_larger_images_take_interpolated_positions(checkpoint):
    teacher, larger = OpenClip(checkpoint=checkpoint), IMAGE.model_copy(update={"size": 32})
    check_teacher(teacher, larger)
    assert teacher.build(larger).layout.grid == (4, 4)


def test_what_does_not_fit_is_refused(checkpoint, tmp_path):
    def build(image=IMAGE, path=checkpoint):
        return OpenClip(checkpoint=path).build(image)

    with pytest.raises(UserError, match=r"allowed: an existing \.safetensors file"):
        build(path=str(tmp_path / "clip.pt"))
    with pytest.raises(UserError, match="open_clip needs captions; choose timm or dense"):
        build(IMAGE.model_copy(update={"task": TWO}))
    other = TASK.model_copy(update={"words": 31})
    with pytest.raises(UserError, match="31 words and 9 tokens per caption; allowed: 30 and 9"):
        build(IMAGE.model_copy(update={"task": other}))
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="is no CLIP of open_clip's: lacks visual"):
        build(path=str(path))


NAME = "deit_tiny_patch16_224"
TWO = Classification(classes=("a", "b"))
IMAGENET = ImageSpec(channels=3, size=224, task=TWO, mean=(0.1,) * 3, std=(1.0,) * 3)


@pytest.fixture(scope="module")
def timm_checkpoint(tmp_path_factory):
    define_missing_operators()
    import timm

    torch.manual_seed(0)
    source = timm.create_model(NAME, pretrained=False).eval()
    path = tmp_path_factory.mktemp("timm") / "deit.safetensors"
    save_file(source.state_dict(), path)
    return source, str(path)


def test_the_teacher_is_timms_model_with_timms_normalisation(timm_checkpoint):
    source, path = timm_checkpoint
    teacher = Timm(name=NAME, checkpoint=path).build(IMAGENET)
    images, config = torch.rand(1, 3, 224, 224), source.pretrained_cfg
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = source((images - mean) / std)
        torch.testing.assert_close(teacher(images).prediction, expected, atol=1e-4, rtol=0)


def test_another_resolution_and_grey_images_and_what_cannot_be_a_teacher(timm_checkpoint):
    _, path = timm_checkpoint
    grey = IMAGENET.model_copy(update={"channels": 1, "size": 64, "mean": (0.1,), "std": (1.0,)})
    check_teacher(Timm(name=NAME, checkpoint=path), grey)
    with pytest.raises(UserError, match="allowed: a timm model name"):
        Timm(name="no_such_model").build(IMAGENET)
    with pytest.raises(UserError, match="pickled checkpoints are not loaded"):
        Timm(name=NAME, checkpoint="weights.pth").build(IMAGENET)


SWIN = {"swin": "swin_tiny_patch4_window7_224", "swin_v2": "swinv2_tiny_window8_256"}


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
    return re.sub(r"\d+(?=\.downsample)", lambda found: str(int(found[0]) - 1), name)


@pytest.mark.parametrize(("kind", "names"), [("swin", microsofts), ("swin_v2", str)])
def test_swin_is_read_with_timms_and_with_microsofts_names(tmp_path, kind, names):
    source = swin_checkpoint(kind)
    path = tmp_path / "swin.safetensors"
    state = source.state_dict()
    if names is microsofts:  # theirs hold what follows from the sizes, too
        state = {microsofts(name): value for name, value in state.items()}
        state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(2, 2)
    save_file(state, path)
    size = source.patch_embed.img_size[0]
    image = IMAGENET.model_copy(update={"size": size})
    teacher = Timm(name=SWIN[kind], checkpoint=str(path)).build(image)
    pixels = torch.rand(1, 3, size, size)
    with torch.no_grad():
        expected = source(teacher.normalised(pixels))
        torch.testing.assert_close(teacher(pixels).prediction, expected, atol=1e-4, rtol=1e-4)
    if names is str:
        small = IMAGENET.model_copy(update={"size": 64})
        other = Timm(name=SWIN[kind], checkpoint=str(path)).build(small)
        assert other(torch.rand(1, 3, 64, 64)).prediction.shape == (1, 1000)
        assert other.config.pretrained_windows == (8, 8, 8, 8)


def test_a_file_of_another_model_is_refused_with_its_names(tmp_path):
    source = swin_checkpoint("swin")
    state = {name: value for name, value in source.state_dict().items() if "layers.3" not in name}
    path = tmp_path / "swin.safetensors"
    save_file(state, path)
    with pytest.raises(UserError, match=r"layers\.3\.downsample\.norm\.weight"):
        Timm(name=SWIN["swin"], checkpoint=str(path)).build(IMAGENET)


@pytest.mark.parametrize("name", [NAME, SWIN["swin"]])
def test_a_damaged_file_is_named_in_one_line(tmp_path, name):
    path = tmp_path / "damaged.safetensors"
    save_file({"head.weight": torch.zeros(5, 5)}, path)
    path.write_bytes(path.read_bytes()[:-20])  # a download that broke off
    said = r"^teacher\.checkpoint: .*damaged\.safetensors: damaged"
    with pytest.raises(UserError, match=said) as refused:
        Timm(name=name, checkpoint=str(path)).build(IMAGENET)
    assert "\n" not in str(refused.value)


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
        Timm(name=name, checkpoint="not_read.safetensors").check_name(IMAGENET)
    said = str(refused.value)
    assert said.startswith(f"teacher.name: found {name}, which has ")
    assert UNSUPPORTED[name] in said and "; allowed: " in said and "\n" not in said


@pytest.mark.parametrize(
    "name", ["deit3_small_patch16_224", "deit_tiny_distilled_patch16_224.fb_in1k", SWIN["swin_v2"]]
)
def test_plain_models_are_taken(name):
    with meta_device_context():
        Timm(name=name).check_name(IMAGENET)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.no_such_tag", "vit_small_patch32_clip_224"])
def test_names_without_weights_are_refused(name):
    with meta_device_context(), pytest.raises(UserError, match="^teacher.name: found "):
        Timm(name=name).check_name(IMAGENET)


def test_the_check_of_a_study_names_file_line_and_key(tmp_path):
    before, _, after = PARAMS.partition("teacher:\n")
    teacher = "teacher: {kind: timm, name: vit_small_patch14_reg4_dinov2}\n"
    text = before + teacher + after[after.index("teacher_router") :]
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    line = before.count("\n") + 1
    said = "teacher.name: found vit_small_patch14_reg4_dinov2, which has register tokens"
    with pytest.raises(UserError, match=rf"params\.yaml:{line}:\d+: {said}[^\n]*$"):
        check_study(tmp_path / "params.yaml")


def test_a_dense_teachers_own_data_are_prepared_once(tmp_path):
    settings = {"model": {"kind": "vit", "patch": 8, "width": 8, "depth": 1, "heads": 1}}
    settings["training"] = {"epochs": 1, "batch": 4, "learning_rate": 1e-3}
    Digits(size=16).write(tmp_path / "pretrain")
    first = Prepared.open(tmp_path / "pretrain")
    assert Dense(**settings).open_data(first, tmp_path) is first
    own = Dense(**settings, data=Clusters(patch=8, grid=2, train=40, validation=10, test=10))
    opened = own.open_data(first, tmp_path)
    assert len(opened.train.labels) == 40 and opened.task.classes == ("-1", "+1")
    (opened.folder / "card.json").touch()  # what a second call would replace
    before = (opened.folder / "card.json").stat().st_mtime_ns
    own.open_data(first, tmp_path)
    assert (opened.folder / "card.json").stat().st_mtime_ns == before

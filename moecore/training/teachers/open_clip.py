"""Load CLIP weights in open_clip's format (ViT-B/32, B/16, L/14) for both towers."""

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError, find_teacher_checkpoint
from moecore.core.safetensors_files import read_tensors
from moecore.nn.backbones import base_model, two_towers, vit
from moecore.tasks.image_text import ImageText
from moecore.training.teachers.base import Teacher

HEAD_WIDTH = 64
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
WEIGHT_NAME_PATTERNS = (  # open_clip's → ours; the first match counts
    (r"visual\.conv1\.weight", "visual.patch_embed.proj.weight"),
    (r"visual\.class_embedding", "visual.cls_token"),
    (r"visual\.positional_embedding", "visual.pos_embed"),
    (r"visual\.ln_pre\.", "visual.norm_pre."),
    (r"visual\.ln_post\.", "visual.norm."),
    (r"visual\.proj", "visual.head.weight"),
    (r"visual\.transformer\.resblocks\.", "visual.blocks."),
    (r"transformer\.resblocks\.", "text.blocks."),
    (r"token_embedding\.", "text.embedding."),
    (r"positional_embedding", "text.positions"),
    (r"ln_final\.", "text.norm."),
    (r"text_projection", "text.projection.weight"),
)
BLOCK_WEIGHT_NAMES = (  # within a block
    ("ln_1.", "norm1."),
    ("ln_2.", "norm2."),
    ("attn.in_proj_", "attn.qkv."),
    ("attn.out_proj.", "attn.proj."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
)


class OpenClip(Teacher):
    """A CLIP from a checkpoint file, from which a two-tower model starts (``upcycle``)."""

    volumes: ClassVar[bool] = False

    kind: Literal["open_clip"] = "open_clip"
    checkpoint: str = Field(description="a .safetensors file such as open_clip_model.safetensors")
    activation: Literal["gelu", "quick_gelu"] = Field(
        "gelu", description="quick_gelu: for OpenAI's weights; the file does not tell"
    )
    training: None = None

    def build(self, image: base_model.ImageSpec) -> base_model.BackboneModel:
        """Return the pretrained towers at the size of ``image``, with CLIP's normalisation."""
        # Raises UserError for a missing or foreign file, and for data without fitting captions.
        if not isinstance(image.task, ImageText):
            raise UserError("teacher.kind: open_clip needs captions; choose timm or dense")
        tensors, _ = read_tensors(find_teacher_checkpoint(self.checkpoint))
        weights = rename_clip_weights(tensors, self.checkpoint)
        settings = two_tower_settings_from_weights(weights, self.activation)
        size = len(weights["text.embedding.weight"])
        context = len(weights["text.positions"])
        if (image.task.words, image.task.context) != (size, context):
            raise UserError(
                f"teacher.checkpoint: the data have {image.task.words:,} words and "
                f"{image.task.context} tokens per caption; allowed: {size:,} and {context}, as in "
                "the file"
            )
        side = round((weights["visual.pos_embed"].shape[1] - 1) ** 0.5) * settings.image.patch
        spec = base_model.ImageSpec(
            channels=weights["visual.patch_embed.proj.weight"].shape[1],
            size=side,
            mean=MEAN,
            std=STD,
            task=image.task,
        )
        if spec.channels != image.channels:
            text = f"images of {image.channels} channels"
            raise UserError.at("teacher.checkpoint", found=text, allowed=spec.channels)
        model = settings.build(spec.model_copy(update={"size": image.size}))
        weights = model.adapt_weights(weights, settings, spec, "bicubic")
        unmatched = model.load_state_dict(weights, strict=False)
        if names := [*unmatched.missing_keys, *unmatched.unexpected_keys]:
            raise UserError(
                f"teacher.checkpoint: {self.checkpoint} is not a CLIP with two transformers: "
                f"unmatched {names[:4]}"
            )
        return model.eval()


def rename_clip_weights(weights: Mapping[str, Tensor], file: str) -> dict[str, Tensor]:
    """Rename open_clip's weights as in moecore, in fp32; biases that CLIP lacks are 0."""
    ours_by_name: dict[str, Tensor] = {}
    for name, value in weights.items():
        new = name
        for pattern, ours in WEIGHT_NAME_PATTERNS:
            if re.match(pattern, name):
                new = re.sub(f"^{pattern}", ours, name)
                break
        if ".blocks." in new:
            for theirs, ours in BLOCK_WEIGHT_NAMES:
                new = new.replace(theirs, ours)
        ours_by_name[new] = value.float()
    needed = ("visual.patch_embed.proj.weight", "visual.head.weight", "text.projection.weight")
    needed += ("visual.cls_token", "visual.pos_embed", "text.positions", "text.embedding.weight")
    if lacking := [name for name in (*needed, "logit_scale") if name not in ours_by_name]:
        raise UserError(f"teacher.checkpoint: {file} is no CLIP of open_clip's: lacks {lacking[0]}")
    width = ours_by_name["visual.cls_token"].numel()
    ours_by_name["visual.cls_token"] = ours_by_name["visual.cls_token"].view(1, 1, width)
    ours_by_name["visual.pos_embed"] = ours_by_name["visual.pos_embed"][None]
    ours_by_name["visual.patch_embed.proj.bias"] = torch.zeros(width)
    for name in ("visual.head.weight", "text.projection.weight"):
        ours_by_name[name] = ours_by_name[name].T.contiguous()
    ours_by_name["visual.head.bias"] = torch.zeros(len(ours_by_name["visual.head.weight"]))
    ours_by_name["logit_scale"] = ours_by_name["logit_scale"].view(1)
    ours_by_name.pop("attn_mask", None)
    return ours_by_name


def two_tower_settings_from_weights(
    weights: Mapping[str, Tensor], activation: Literal["gelu", "quick_gelu"]
) -> two_towers.TwoTowers:
    kernel = weights["visual.patch_embed.proj.weight"]
    width = kernel.shape[0]
    text = weights["text.positions"].shape[1]
    hidden = weights["visual.blocks.0.mlp.fc1.weight"].shape[0]
    inner = weights["text.blocks.0.mlp.fc1.weight"].shape[0]
    return two_towers.TwoTowers(
        image=vit.Vit(
            patch=kernel.shape[-1],
            width=width,
            depth=_count_blocks(weights, "visual"),
            heads=width // HEAD_WIDTH,
            mlp_ratio=hidden / width,
            pre_norm=True,
            activation=activation,
            norm_eps=1e-5,
        ),
        text=two_towers.TextTowerSettings(
            width=text,
            depth=_count_blocks(weights, "text"),
            heads=text // HEAD_WIDTH,
            mlp_ratio=inner / text,
            activation=activation,
        ),
        joint=len(weights["visual.head.weight"]),
    )


def _count_blocks(weights: Mapping[str, Tensor], tower: str) -> int:
    numbers = [re.match(rf"{tower}\.blocks\.(\d+)\.", name) for name in weights]
    return 1 + max((int(match[1]) for match in numbers if match), default=-1)

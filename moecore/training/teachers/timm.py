"""Pretrained weights of timm's plain vision transformers (ViT, DeiT, DeiT-III), as a frozen
teacher.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import nn

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import VisionTransformer, Vit
from moecore.tasks.classification import Classification
from moecore.training.teachers.torchvision_operators import define_missing_operators

# by the number of special tokens
POOLING: dict[int, Literal["mean", "class", "class+distillation"]] = {
    0: "mean",
    1: "class",
    2: "class+distillation",
}


class Timm(Config):
    """A timm model by name, with timm's pretrained weights (downloaded) or those of a checkpoint
    file.
    """

    kind: Literal["timm"] = "timm"
    name: str = Field(
        description="timm's model name, for example deit3_small_patch16_224.fb_in22k_ft_in1k"
    )
    checkpoint: str | None = Field(
        default=None,
        description="a .safetensors file with timm's parameter names; "
        "null downloads timm's weights",
    )
    training: None = None  # it comes trained, the same for every seed

    def build(self, image: ImageSpec) -> VisionTransformer:
        """The pretrained model at the resolution and channels of ``image``, normalised as timm's
        config says.

        timm interpolates positions and adapts the input weights. The classes keep the pretraining's
        numbers: "0", "1", … Raises UserError for an unknown name, a missing file, or a model that
        is not a plain vision transformer.
        """
        source = self._timm_model(image)
        config = source.pretrained_cfg
        spec = ImageSpec(
            channels=image.channels,
            size=image.size,
            mean=_for_channels(config["mean"], image.channels),
            std=_for_channels(config["std"], image.channels),
            task=Classification(classes=tuple(map(str, range(source.num_classes)))),
        )
        model = vit_settings(source, self.name).build(spec)
        missing = model.load_state_dict(source.state_dict(), strict=False)
        if missing.missing_keys or missing.unexpected_keys:
            unmatched = [*missing.missing_keys, *missing.unexpected_keys][:4]
            found = f"{self.name} is not a plain ViT or DeiT: unmatched {unmatched}"
            raise UserError(f"teacher.name: {found}")
        return model.eval()

    def _timm_model(self, image: ImageSpec) -> Any:
        define_missing_operators()
        import timm

        if not timm.is_model(self.name.split(".")[0]):
            near = timm.list_models(f"*{self.name.split('_')[0]}*")[:5]
            example = ", ".join(near) or "deit_small_patch16_224"
            allowed = f"a timm model name, for example {example}"
            raise UserError(f"teacher.name: found {self.name!r}; allowed: {allowed}")
        overlay = None
        if self.checkpoint is not None:
            if not (self.checkpoint.endswith(".safetensors") and Path(self.checkpoint).is_file()):
                allowed = "an existing .safetensors file (pickled checkpoints are not loaded)"
                raise UserError(
                    f"teacher.checkpoint: found {self.checkpoint!r}; allowed: {allowed}"
                )
            overlay = {"file": self.checkpoint, "custom_load": False}
        return timm.create_model(
            self.name,
            pretrained=True,
            pretrained_cfg_overlay=overlay,
            in_chans=image.channels,
            img_size=image.size,
        )


def vit_settings(source: Any, name: str) -> Vit:
    """Our settings of a timm VisionTransformer or VisionTransformerDistilled.

    Raises UserError for other architectures.
    """
    required = ("patch_embed", "blocks", "pos_embed", "num_prefix_tokens")
    complete = all(hasattr(source, attribute) for attribute in required)
    if not complete or not hasattr(source.blocks[0], "attn"):
        allowed = "timm's plain vision transformers (vit_*, deit_*, deit3_*)"
        raise UserError(f"teacher.name: found {name}; allowed: {allowed}")
    block = source.blocks[0]
    return Vit(
        patch=source.patch_embed.patch_size[0],
        width=source.embed_dim,
        depth=len(source.blocks),
        heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / source.embed_dim,
        pooling=POOLING[source.num_prefix_tokens],
        position_on_class=not source.no_embed_class,
        layer_scale=None if isinstance(block.ls1, nn.Identity) else 1e-6,
        qkv_bias=block.attn.qkv.bias is not None,
    )


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """timm's per-channel statistics for images with another number of channels: their average for
    each.
    """
    if len(values) == channels:
        return tuple(values)
    return (sum(values) / len(values),) * channels

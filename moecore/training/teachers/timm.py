"""Pretrained weights of timm's plain vision transformers (ViT, DeiT, DeiT-III) and of Swin V1
and V2, as a frozen teacher.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import BackboneModel
from moecore.nn.backbones.swin import Swin, SwinSettings
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.backbones.vit import Vit
from moecore.tasks.classification import Classification
from moecore.training.teachers.torchvision_operators import define_missing_operators

# buffers of Swin, which are no weights
FOLLOWS = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")

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

    def build(self, image: ImageSpec) -> BackboneModel:
        """The pretrained model at the resolution and channels of ``image``, normalised as timm's
        config says.

        Positions are interpolated (ViT: by timm; Swin's tables: bicubically), input weights
        adapted by timm. The classes keep the pretraining's numbers: "0", "1", … Raises UserError
        for an unknown name, a missing or foreign file, or a model of another architecture.
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
        if self._swin:
            settings = swin_settings(source, self.name)
            trained = spec.model_copy(update={"size": source.patch_embed.img_size[0]})
            weights = swin_weights(source.state_dict())
            model = settings.trained_on(trained).build(spec)
            weights = model.moved(weights, settings, trained)
        else:
            model = vit_settings(source, self.name).build(spec)
            weights = source.state_dict()
        missing = model.load_state_dict(weights, strict=False)
        if missing.missing_keys or missing.unexpected_keys:
            unmatched = [*missing.missing_keys, *missing.unexpected_keys][:4]
            found = f"{self.name} is not a plain ViT, DeiT or Swin: unmatched {unmatched}"
            raise UserError(f"teacher.name: {found}")
        return model.eval()

    @property
    def _swin(self) -> bool:
        return self.name.startswith(("swin_", "swinv2_")) and "_cr_" not in self.name

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
        try:
            return timm.create_model(
                self.name,
                pretrained=True,
                pretrained_cfg_overlay=overlay,
                in_chans=image.channels,
                img_size=None if self._swin else image.size,  # None: the model's own
            )
        except SafetensorError as error:
            file = self.checkpoint or f"the downloaded weights of {self.name}"
            mend = "copy or download it again"
            raise UserError(f"teacher.checkpoint: {file}: damaged ({error}); {mend}") from error
        except RuntimeError as error:
            if self.checkpoint is None:
                raise
            raise UserError(
                f"teacher.checkpoint: {self.checkpoint} does not hold {self.name}: {error}"
            ) from error


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


def swin_settings(source: Any, name: str) -> SwinSettings:
    """Our settings of a timm SwinTransformer or SwinTransformerV2.

    Raises UserError for other architectures.
    """
    if not hasattr(source, "layers") or not hasattr(source.layers[0].blocks[0], "window_size"):
        allowed = "timm's Swin transformers (swin_*, swinv2_* but for swinv2_cr_*)"
        raise UserError(f"teacher.name: found {name}; allowed: {allowed}")
    first = [stage.blocks[0] for stage in source.layers]
    second = hasattr(first[0].attn, "logit_scale")
    learned = None
    if second and any(block.attn.pretrained_window_size[0] for block in first):
        learned = tuple(block.attn.pretrained_window_size[0] for block in first)
    kind = SwinV2 if second else Swin
    return kind(
        patch=source.patch_embed.patch_size[0],
        width=source.embed_dim,
        depths=tuple(len(stage.blocks) for stage in source.layers),
        heads=tuple(block.attn.num_heads for block in first),
        window=max(block.window_size[0] for block in first),
        pretrained_windows=learned,
        mlp_ratio=first[0].mlp.fc1.out_features / source.embed_dim,
    )


def swin_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's weights of a Swin under our names, without what follows from the sizes."""
    return {
        name.replace("head.fc.", "head."): value
        for name, value in state.items()
        if not name.endswith(FOLLOWS)
    }


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """timm's per-channel statistics for images with another number of channels: their average for
    each.
    """
    if len(values) == channels:
        return tuple(values)
    return (sum(values) / len(values),) * channels

"""Teachers from timm: plain vision transformers (ViT, DeiT, DeiT-III), Swin V1 and V2."""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from moecore.core.files import UserError, find_teacher_checkpoint
from moecore.core.safetensors_files import check_header_size
from moecore.nn.backbones import swin, swin_v2, vit
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.tasks.classification import Classification
from moecore.training.teachers.base import Teacher

# Buffers of a Swin that follow from its sizes; no weights.
BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")
MODULES = ("vision_transformer", "deit", "swin_transformer", "swin_transformer_v2")  # of timm
SUPPORTED = "plain ViT, DeiT, DeiT-III (vit_*, deit_*, deit3_*), Swin V1 and V2 (swin_*, swinv2_*)"
Pooling = Literal["mean", "class", "class+distillation"]
POOLING_BY_SPECIAL_TOKENS: tuple[Pooling, ...] = ("mean", "class", "class+distillation")


class Timm(Teacher):
    """A timm model by name, with timm's weights (downloaded) or weights from a file."""

    volumes: ClassVar[bool] = False

    kind: Literal["timm"] = "timm"
    name: str = Field(description="timm's name, such as deit3_small_patch16_224.fb_in22k_ft_in1k")
    checkpoint: str | None = Field(None, description=".safetensors, timm's names; null: download")
    training: None = None

    def build(self, image: ImageSpec) -> BackboneModel:
        """Return the pretrained model, with timm's normalisation and interpolated positions."""
        # Classes are named by number. Raises UserError for a name or a file that does not fit.
        model, weights = self._convert(self._load_timm_model(image), image)
        model.load_state_dict(weights)
        return model.eval()

    def check_name(self, image: ImageSpec) -> None:
        """Raise UserError for a name that timm does not know, or a model that moecore lacks."""
        timm = self._import_timm_and_check_name()
        source = timm.create_model(self.name, pretrained=False, **self._image_arguments(image))
        self._convert(source, image)

    def _convert(self, source: Any, image: ImageSpec) -> tuple[BackboneModel, dict[str, Tensor]]:
        """Convert a timm model to moecore's model and its weights; UserError if impossible."""
        unsupported = unsupported_features(source)
        if unsupported:
            raise self._name_error(f"which has {', '.join(unsupported)}")
        mean, std = source.pretrained_cfg["mean"], source.pretrained_cfg["std"]
        if len(mean) != image.channels:  # their average for each
            mean, std = ((sum(values) / len(values),) * image.channels for values in (mean, std))
        spec = ImageSpec(
            channels=image.channels,
            size=image.size,
            mean=tuple(mean),
            std=tuple(std),
            task=Classification(classes=tuple(map(str, range(source.num_classes)))),
        )
        weights: dict[str, Tensor] = source.state_dict()
        try:
            if self._is_swin:
                settings = swin_settings(source)
                trained = spec.model_copy(update={"size": source.patch_embed.img_size[0]})
                model = settings.trained_on(trained).build(spec)
                weights = model.adapt_weights(rename_swin_weights(weights), settings, trained)
            else:
                model = vit_settings(source).build(spec)
        except UserError as error:
            reason = f"which does not fit images of {image.size} pixels: {error}"
            raise self._name_error(reason) from error
        ours = {name: value.shape for name, value in model.state_dict().items()}
        theirs = {name: value.shape for name, value in weights.items()}
        names = dict.fromkeys([*theirs, *ours])
        if unmatched := [name for name in names if ours.get(name) != theirs.get(name)]:
            reason = f"whose weights {', '.join(unmatched[:4])} ours lacks or has in another shape"
            raise self._name_error(reason)
        return model, weights

    def _name_error(self, reason: str) -> UserError:
        return UserError.at("teacher.name", found=f"{self.name}, {reason}", allowed=SUPPORTED)

    @property
    def _is_swin(self) -> bool:
        return self.name.startswith(("swin_", "swinv2_"))

    def _image_arguments(self, image: ImageSpec) -> dict[str, Any]:
        return {"in_chans": image.channels, "img_size": None if self._is_swin else image.size}

    def _import_timm_and_check_name(self) -> Any:
        """Return the module timm; UserError if it does not know the name or has no weights."""
        with torch.device("cpu"):  # tensors that timm creates at import need values
            define_missing_operators()
            import timm

        architecture = self.name.split(".")[0]
        if not timm.is_model(architecture):
            examples = timm.list_models(f"*{self.name.split('_')[0]}*")[:5]
            examples = examples or ["deit_small_patch16_224"]
            raise UserError.at(
                "teacher.name",
                found=repr(self.name),
                allowed=f"a timm model name, for example {', '.join(examples)}",
            )
        if not timm.models.is_model_in_modules(architecture, MODULES):
            module = timm.model_entrypoint(architecture).__module__.rpartition(".")[2]
            raise self._name_error(f"which has the architecture {module}")
        if self.checkpoint is None and not timm.is_model_pretrained(self.name):
            names = timm.list_pretrained(f"{architecture}.*")
            raise UserError.at(
                "teacher.name",
                found=f"{self.name}, which timm has no weights for",
                allowed=", ".join([*names, "with teacher.checkpoint any"]),
            )
        return timm

    def _load_timm_model(self, image: ImageSpec) -> Any:
        timm = self._import_timm_and_check_name()
        overlay = None
        try:
            if self.checkpoint is not None:
                path = find_teacher_checkpoint(self.checkpoint)
                check_header_size(path)
                overlay = {"file": str(path), "custom_load": False}
            return timm.create_model(
                self.name,
                pretrained=True,
                pretrained_cfg_overlay=overlay,
                **self._image_arguments(image),
            )
        except SafetensorError as error:
            file = self.checkpoint or f"the downloaded weights of {self.name}"
            why = f"damaged ({error}); copy or download it again"
            raise UserError(f"teacher.checkpoint: {file}: {why}") from error
        except RuntimeError as error:
            if self.checkpoint is None:
                raise
            why = f"does not hold {self.name}: {error}"
            raise UserError(f"teacher.checkpoint: {self.checkpoint} {why}") from error


def unsupported_features(source: Any) -> list[str]:
    """Describe the features of a timm model that moecore's ViT and Swin lack."""
    if not hasattr(source, "blocks"):  # a Swin
        first = [stage.blocks[0] for stage in source.layers]
        window = max(block.window_size[0] for block in first)
        if any(block.window_size[0] < min(window, *block.input_resolution) for block in first):
            return ["windows of different sizes in its stages"]
        return []
    block = source.blocks[0]
    if type(block).__name__ != "Block":
        return [f"blocks of the kind {type(block).__name__}"]
    parts = (source.patch_embed, block.attn, block.mlp)
    embedding, attention, mlp = (type(part).__name__ for part in parts)
    activation = type(block.mlp.act).__name__
    pooling = "token" if source.has_class_token else "avg"
    unsupported = []
    if embedding != "PatchEmbed":
        unsupported.append(f"patches by {embedding}")
    if source.num_reg_tokens > 0:
        unsupported.append("register tokens")
    if source.pos_embed is None:
        unsupported.append("no learned positions")
    if not isinstance(source.norm_pre, nn.Identity):
        unsupported.append("a norm before the first block")
    if attention != "Attention":
        unsupported.append(f"attention of the kind {attention}")
    if mlp != "Mlp":
        unsupported.append(f"gated feed-forwards ({mlp})")
    if activation != "GELU":
        unsupported.append(f"the activation {activation}")
    if source.global_pool != pooling:
        unsupported.append(f"the pooling {source.global_pool}")
    if pooling == "avg" and isinstance(source.fc_norm, nn.Identity):
        unsupported.append("the last norm before the mean of the tokens")
    if source.num_classes == 0:
        unsupported.append("no classifier")
    return unsupported


def vit_settings(source: Any) -> vit.Vit:
    """Return moecore's settings of a timm VisionTransformer or VisionTransformerDistilled."""
    block = source.blocks[0]
    return vit.Vit(
        patch=source.patch_embed.patch_size[0],
        width=source.embed_dim,
        depth=len(source.blocks),
        heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / source.embed_dim,
        pooling=POOLING_BY_SPECIAL_TOKENS[source.num_prefix_tokens],
        position_on_class=not source.no_embed_class,
        layer_scale=None if isinstance(block.ls1, nn.Identity) else 1e-6,
        qkv_bias=block.attn.qkv.bias is not None,
        norm_eps=block.norm1.eps,
    )


def swin_settings(source: Any) -> swin.SwinSettings:
    """Return moecore's settings of a timm SwinTransformer or SwinTransformerV2."""
    first = [stage.blocks[0] for stage in source.layers]
    second = hasattr(first[0].attn, "logit_scale")
    learned = None
    if second and any(block.attn.pretrained_window_size[0] for block in first):
        learned = tuple(block.attn.pretrained_window_size[0] for block in first)
    kind = swin_v2.SwinV2 if second else swin.Swin
    return kind(
        patch=source.patch_embed.patch_size[0],
        width=source.embed_dim,
        depths=tuple(len(stage.blocks) for stage in source.layers),
        heads=tuple(block.attn.num_heads for block in first),
        window=max(block.window_size[0] for block in first),
        pretrained_windows=learned,
        mlp_ratio=first[0].mlp.fc1.out_features / source.embed_dim,
    )


def rename_swin_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename timm's Swin weights as in moecore, without buffers."""
    return {
        name.replace("head.fc.", "head."): value
        for name, value in state.items()
        if not name.endswith(BUFFERS)
    }


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Define operators that torchvision needs with CPU torch; they live as long as the result."""
    # Its import registers fake implementations of CUDA operators, to be defined; timm uses none.
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library

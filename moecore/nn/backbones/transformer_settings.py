"""What a transformer of images and one of volumes read of their settings."""

from typing import ClassVar, Literal

from pydantic import Field

from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.layers.block import Activation, HiddenRatio


class TransformerSettings(Backbone):
    """Settings of a vision transformer (Dosovitskiy et al. 2021; DeiT: Touvron et al. 2021)."""

    free_settings: ClassVar[frozenset[str]] = frozenset(
        {"mlp_ratio", "activation", "layer_scale", "drop_path"}
    )

    patch: int = Field(16, ge=1, description="side of a patch, pixels or voxels")
    width: int = Field(192, ge=8, le=2**16, description="width of a token")
    depth: int = Field(12, ge=1, le=1000, description="number of blocks")
    heads: int = Field(3, ge=1, description="attention heads; they divide the width")
    mlp_ratio: HiddenRatio = Field(
        4.0, gt=0, le=1000, description="hidden width of the dense MLP / width"
    )
    pooling: Literal["class", "class+distillation", "mean"] = Field(
        "class", description="head on the class token, it and the distillation token, or the mean"
    )
    position_on_class: bool = Field(
        True, description="special tokens have position embeddings (DeiT-III: false)"
    )
    layer_scale: float | None = Field(
        None, gt=0, description="initial LayerScale, or null for none (DeiT-III: 1e-6)"
    )
    qkv_bias: bool = True
    pre_norm: bool = Field(False, description="a norm before the first block (CLIP's image tower)")
    activation: Activation = Field(
        "gelu",
        description="of dense MLPs; quick_gelu: x·σ(1.702 x), of OpenAI's CLIP; linear: none",
    )
    norm_eps: float = Field(
        1e-6, gt=0, le=1e-2, description="added to a norm's variance (CLIP: 1e-5)"
    )
    drop_path: float = Field(
        0.0, ge=0, lt=1, description="stochastic depth: probability at the last block"
    )

    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        """Patches along each axis of such images."""
        return tuple(size // self.patch for size in image.shape)

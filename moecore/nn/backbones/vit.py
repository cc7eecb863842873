"""Vision transformer of images, dense or with mixture-of-experts blocks.

Parameter names are timm's, so that the weights of timm's ViT, DeiT and DeiT-III models load into
the dense form.
"""

from typing import Literal

from pydantic import Field

from moecore.core.files import UserError
from moecore.nn.backbones.image import ImageSpec, check_patches_and_heads
from moecore.nn.backbones.model import BackboneConfig
from moecore.nn.backbones.transformer import Transformer
from moecore.nn.layers.block import HiddenRatio
from moecore.nn.layers.moe import MoE
from moecore.nn.layers.patch_embed import PatchEmbed


class Vit(BackboneConfig):
    """Settings of a vision transformer (Dosovitskiy et al. 2021; DeiT: Touvron et al. 2021)."""

    kind: Literal["vit"] = "vit"
    patch: int = Field(16, ge=1, description="side of a patch, pixels")
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
    activation: Literal["gelu", "quick_gelu"] = Field(
        "gelu", description="of dense MLPs; quick_gelu: x·σ(1.702 x), of OpenAI's CLIP"
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

    def build(self, image: ImageSpec, moe: MoE | None = None) -> "VisionTransformer":
        """The model for such images; raises UserError where the sizes do not fit, and for
        volumes.
        """
        if len(image.shape) != 2:
            raise UserError(
                f"model.kind: found vit, but the images have {len(image.shape)} axes; allowed: "
                f"{'language_model' if len(image.shape) == 1 else 'vit3d'}"
            )
        check_patches_and_heads(image, self.patch, self.width, self.heads)
        return VisionTransformer(self, image, moe)


class VisionTransformer(Transformer):
    """``model(images)`` with images (B, C, H, W) in [0, 1] gives ModelOutput(prediction (B, K),
    routing).
    """

    def __init__(self, config: Vit, image: ImageSpec, moe: MoE | None = None) -> None:
        super().__init__(config, image, PatchEmbed(image.channels, config.patch, config.width), moe)

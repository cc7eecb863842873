"""Vision transformer of images, dense or with mixture-of-experts blocks.

Parameter names are timm's: its ViT, DeiT and DeiT-III weights load into the dense form.
"""

from typing import Literal

from moecore.nn.backbones.base_model import ImageSpec, check_axes, check_patches_and_heads
from moecore.nn.backbones.patch_transformer_base import PatchTransformer, TransformerSettings
from moecore.nn.layers.moe import MoESettings
from moecore.nn.layers.patch_embed import PatchEmbed


class Vit(TransformerSettings):
    """Settings of a vision transformer of images (B, C, H, W)."""

    kind: Literal["vit"] = "vit"

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> PatchTransformer:
        check_axes(self.kind, image, 2)
        check_patches_and_heads(image, self.patch, self.width, self.heads)
        patch_embed = PatchEmbed(image.channels, self.patch, self.width)
        return PatchTransformer(self, image, patch_embed, moe)

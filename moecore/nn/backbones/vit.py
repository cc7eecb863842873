"""Vision transformer, dense or with MoE blocks; timm's weights (ViT, DeiT, DeiT-III) load."""

from typing import Literal

from pydantic import Field
from torch import nn

from moecore.core.config import Misfits, list_idle_misfits
from moecore.nn.backbones.base_model import ImageSpec, check_axis_count, check_patches_and_heads
from moecore.nn.backbones.patch_transformer_base import PatchTransformer, TransformerSettings
from moecore.nn.layers.moe import MoESettings
from moecore.nn.layers.patch_embed import ConvStem, PatchEmbed


class Vit(TransformerSettings):
    """Settings of a vision transformer of images (B, C, H, W)."""

    kind: Literal["vit"] = "vit"
    stem: Literal["linear", "conv"] = Field(
        "linear", description="map from patch to token: linear, or convolutions before it"
    )
    stem_width: int = Field(16, ge=1, description="conv: channels of the first convolution")

    def remarks(self) -> Misfits:
        if self.stem != "conv":
            yield from list_idle_misfits(self, ["stem_width"], "the stem is linear", "stem: conv")

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> PatchTransformer:
        check_axis_count(self.kind, image, 2)
        check_patches_and_heads(image, self.patch, self.width, self.heads)
        if self.stem == "conv":
            stem: nn.Module = ConvStem(image.channels, self.patch, self.width, self.stem_width)
        else:
            stem = PatchEmbed(image.channels, self.patch, self.width)
        return PatchTransformer(self, image, stem, moe)

"""Vision transformer of volumes; its tokens are cubes (ERMoE-ba: supplement §2.2, algorithm 2)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from moecore.core.config import Misfits, list_idle_misfits
from moecore.core.files import UserError
from moecore.nn.backbones.base_model import ImageSpec, check_axis_count, check_patches_and_heads
from moecore.nn.backbones.patch_transformer_base import PatchTransformer, TransformerSettings
from moecore.nn.layers import patch_embed
from moecore.nn.layers.moe import MoESettings


class Vit3d(TransformerSettings):
    """Settings of a vision transformer over cubes of volumes (B, C, D, H, W)."""

    volumes: ClassVar[bool] = True

    kind: Literal["vit3d"] = "vit3d"
    stem: Literal["linear", "pooled", "conv"] = Field(
        "linear", description="map from cube to token: linear, linear in means, or two convolutions"
    )
    pool: int = Field(4, ge=1, description="pooled: means per axis of a cube; divides the patch")
    stem_width: int = Field(16, ge=1, description="conv: channels of the first convolution")
    positions: Literal["learned", "sinusoidal"] = Field(
        "learned", description="learned, or fixed sinusoids along the three axes"
    )

    def remarks(self) -> Misfits:
        # It is not an error: the preset ``adni`` replaces a stem of convolutions by a linear one.
        for name, stem in (("pool", "pooled"), ("stem_width", "conv")):
            if self.stem != stem:
                why = f"the stem is {self.stem}"
                yield from list_idle_misfits(self, [name], why, f"stem: {stem}")

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> "VolumeTransformer":
        check_axis_count(self.kind, image, 3)
        check_patches_and_heads(image, self.patch, self.width, self.heads)
        if self.stem == "pooled" and self.patch % self.pool:
            allowed = f"a divisor of model.patch = {self.patch}"
            raise UserError.at("model.pool", found=self.pool, allowed=allowed)
        if self.stem == "conv" and self.patch % 4:
            raise UserError(
                f"model.stem: found conv with model.patch = {self.patch}; allowed: a patch that "
                "is a multiple of 4, as the stem's two convolutions halve each axis"
            )
        if self.positions == "sinusoidal" and self.width % 6:
            raise UserError(
                f"model.positions: found sinusoidal with model.width = {self.width}; allowed: a "
                "multiple of 6, a sine and a cosine along each axis"
            )
        return VolumeTransformer(self, image, moe)


class VolumeTransformer(PatchTransformer):
    """``model(volumes)`` with volumes (B, C, D, H, W) in [0, 1] returns a ModelOutput."""

    def __init__(self, config: Vit3d, image: ImageSpec, moe: MoESettings | None = None) -> None:
        super().__init__(config, image, _build_stem(config, image.channels), moe)
        if config.positions == "sinusoidal":
            fixed = patch_embed.sinusoidal_positions(config.grid(image), config.width)
            del self.pos_embed
            special = fixed.new_zeros(1, self.positioned_special, config.width)
            self.register_buffer("pos_embed", torch.cat([special, fixed], dim=1), persistent=False)


def _build_stem(config: Vit3d, channels: int) -> nn.Module:
    if config.stem == "pooled":
        return patch_embed.PooledLinearStem(channels, config.patch, config.width, config.pool)
    if config.stem == "conv":
        return patch_embed.ConvStem3d(channels, config.patch, config.width, config.stem_width)
    return patch_embed.PatchEmbed(channels, config.patch, config.width, axes=3)

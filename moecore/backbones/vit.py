"""Vision transformer, dense or with mixture-of-experts blocks.

Parameter names are timm's, so that the weights of timm's ViT, DeiT and DeiT-III models load into the dense form.
B images, C channels, T tokens (special tokens first, then patches in row-major order), K classes.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.correspondence import match_tokens
from moecore.files import StageError
from moecore.layers.block import Block
from moecore.layers.linear import linear
from moecore.layers.mlp import Mlp
from moecore.layers.moe import MoE
from moecore.layers.patch_embed import PatchEmbed
from moecore.records import Feature, Guidance, Layout, ModelOutput, RoutingContext

class Vit(Config):
    """Settings of a vision transformer (Dosovitskiy et al. 2021; DeiT: Touvron et al. 2021)."""

    kind: Literal["vit"] = "vit"
    patch: int = Field(default=16, ge=1, description="side of a patch, pixels")
    width: int = Field(default=192, ge=8, description="width of a token")
    depth: int = Field(default=12, ge=1, description="number of blocks")
    heads: int = Field(default=3, ge=1, description="attention heads; they divide the width")
    mlp_ratio: float = Field(default=4.0, gt=0, description="hidden width of the dense MLP / width")
    pooling: Literal["class", "class+distillation", "mean"] = Field(
        default="class", description="head on the class token, on class and distillation token (averaged), or on the mean of the patches"
    )
    position_on_class: bool = Field(default=True, description="the special tokens have position embeddings too (DeiT-III: false)")
    layer_scale: float | None = Field(default=None, gt=0, description="initial LayerScale, or null for none (DeiT-III: 1e-6)")
    qkv_bias: bool = True

    def build(self, image: ImageSpec, moe: MoE | None = None) -> "VisionTransformer":
        """The model for such images; raises StageError where the sizes do not fit."""
        if image.size % self.patch:
            raise StageError(f"model.patch: found {self.patch}; allowed: a divisor of the image size {image.size}")
        if self.width % self.heads:
            raise StageError(f"model.heads: found {self.heads}; allowed: a divisor of model.width = {self.width}")
        return VisionTransformer(self, image, moe)


class VisionTransformer(nn.Module):
    """``model(images)`` with images (B, C, H, W) in [0, 1] gives ModelOutput(prediction (B, K), routing)."""

    def __init__(self, config: Vit, image: ImageSpec, moe: MoE | None = None) -> None:
        super().__init__()
        self.config, self.image, self.moe = config, image, moe
        width, special = config.width, {"class": 1, "class+distillation": 2, "mean": 0}[config.pooling]
        self.special, side = special, image.size // config.patch
        self.patch_embed = PatchEmbed(image.channels, config.patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if special >= 1 else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, width)) if special == 2 else None
        self.pos_embed = nn.Parameter(torch.zeros(1, side * side + self.positioned, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, mlp, config.qkv_bias, config.layer_scale) for mlp in self._feed_forwards())
        self.norm = nn.LayerNorm(width, eps=1e-6) if special else nn.Identity()
        self.fc_norm = nn.Identity() if special else nn.LayerNorm(width, eps=1e-6)
        self.head = linear(width, len(image.classes))
        self.head_dist = linear(width, len(image.classes)) if special == 2 else None
        for name, values in (("pixel_mean", image.mean), ("pixel_std", image.std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)
        for token in (self.cls_token, self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    @property
    def positioned(self) -> int:
        """How many special tokens have a position embedding."""
        return self.special if self.config.position_on_class else 0

    @property
    def layout(self) -> Layout:
        """Where the tokens lie in the image."""
        side = self.image.size // self.config.patch
        return Layout(self.special, (side, side), (self.image.size, self.image.size))

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def forward(self, images: Tensor, guidance: Guidance | None = None, progress: float = 1.0) -> ModelOutput:
        """``guidance``: a teacher's, for routers that want it. ``progress``: share of the training that is done."""
        tokens, records, _ = self.encode(images, guidance=guidance, progress=progress)
        heads = self.heads(tokens)
        return ModelOutput(torch.stack(heads).mean(dim=0) if len(heads) > 1 else heads[0], records, heads)

    def encode(
        self, images: Tensor, at: Feature | None = None, blocks: tuple[int, ...] = (), guidance: Guidance | None = None, progress: float = 1.0
    ) -> tuple[Tensor, tuple, tuple[Tensor, ...]]:
        """Images to (final tokens (B, T, width), routing records, features (B, T, width) of each of ``blocks``).

        ``at``: "mlp_input" the input of the block's feed-forward, "block_out" its output, "final" the normalised last tokens.
        """
        tokens = self.embed((images - self.pixel_mean) / self.pixel_std)
        contexts = self._contexts(images, tokens.shape, guidance, progress)
        records, found = (), {}
        for index, block in enumerate(self.blocks):
            tokens, entering, record = block(tokens, contexts.get(index, RoutingContext()))
            records += record
            if index in blocks:
                found[index] = entering if at == "mlp_input" else tokens
        tokens = self.norm(tokens)
        return tokens, records, tuple(tokens if at == "final" else found[index] for index in blocks)

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images to (B, T, width) tokens with positions."""
        tokens = self.patch_embed(images)
        special = [token.expand(len(tokens), -1, -1) for token in (self.cls_token, self.dist_token) if token is not None]
        if self.config.position_on_class:
            return torch.cat([*special, tokens], dim=1) + self.pos_embed
        return torch.cat([*special, tokens + self.pos_embed], dim=1)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens (B, T, width) to the logits (B, K) of every head: class, then distillation where there is one."""
        if not self.special:
            return (self.head(self.fc_norm(tokens.mean(dim=1))),)
        return (self.head(tokens[:, 0]),) if self.head_dist is None else (self.head(tokens[:, 0]), self.head_dist(tokens[:, 1]))

    def predict(self, tokens: Tensor) -> Tensor:
        """Final tokens to logits (B, K), averaged over the heads (as DeiT does at inference)."""
        logits = self.heads(tokens)
        return logits[0] if len(logits) == 1 else torch.stack(logits).mean(dim=0)

    def _contexts(self, images: Tensor, tokens: torch.Size, guidance: Guidance | None, progress: float) -> dict[int, RoutingContext]:
        """What the routers may look at beside their tokens, by block: all but the attention, which the block adds."""
        if self.moe is None:
            return {}
        wants, layers = self.moe.router.wants, self.moe.indices(self.config.depth)
        patches = self._patches(images) if "patches" in wants else None
        teachers = guidance.probs if guidance is not None and "teacher" in wants else (None,) * len(layers)
        matched = (None if probs is None else match_tokens(probs, (*tokens[:2], probs.shape[-1])) for probs in teachers)
        return {index: RoutingContext(patches=patches, teacher=probs, progress=progress) for index, probs in zip(layers, matched, strict=True)}

    def _patches(self, images: Tensor) -> Tensor:
        """Each token's pixels (B, T, C·patch²) in [0, 1]; zeros for the special tokens."""
        pixels = unfold(images, self.config.patch, stride=self.config.patch).transpose(1, 2)
        return pad(pixels, (0, 0, self.special, 0))

    def _feed_forwards(self) -> list[nn.Module]:
        sparse = () if self.moe is None else self.moe.indices(self.config.depth)
        hidden = round(self.config.width * self.config.mlp_ratio)
        return [self.moe.build(self.config.width) if index in sparse else Mlp(self.config.width, hidden) for index in range(self.config.depth)]

"""Base settings and model of transformers over patches of images or volumes."""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord, TokenLayout
from moecore.nn.backbones import base_model
from moecore.nn.layers import block as layers
from moecore.nn.layers.moe import MoESettings, build_feed_forwards
from moecore.nn.layers.patch_embed import Interpolation, resize_positions

INITIAL_STD = 0.02  # of timm's ViT
DRAWN_SUFFIXES = (".qkv.weight", ".proj.weight", ".fc1.weight", ".fc2.weight", ".up", ".down")


class TransformerSettings(base_model.Backbone):
    """Settings of a vision transformer (Dosovitskiy et al. 2021; DeiT: Touvron et al. 2021)."""

    free_settings: ClassVar[frozenset[str]] = frozenset(
        "mlp_ratio activation layer_scale drop_path initial_std position_std stem_width".split()
    )

    patch: int = Field(16, ge=1, description="side of a patch, pixels or voxels")
    width: int = Field(192, ge=8, le=2**16, description="width of a token")
    depth: int = Field(12, ge=1, le=1000, description="number of blocks")
    heads: int = Field(3, ge=1, description="number of attention heads; divides the width")
    mlp_ratio: layers.HiddenRatio = Field(4.0, description="hidden width of the dense MLP / width")
    pooling: Literal["class", "class+distillation", "mean"] = Field(
        "class", description="head on the class token, also the distillation token, or the mean"
    )
    position_on_class: bool = Field(True, description="special tokens get positions (not DeiT-III)")
    layer_scale: float | None = Field(None, gt=0, description="initial; null: off (DeiT-III: 1e-6)")
    qkv_bias: bool = True
    pre_norm: bool = Field(False, description="a norm before the first block (CLIP's image tower)")
    activation: layers.Activation = Field(
        "gelu", description="of dense MLPs; quick_gelu: x·σ(1.702 x), as in CLIP; linear: none"
    )
    norm_eps: float = Field(1e-6, gt=0, le=1e-2, description="added to the variance (CLIP: 1e-5)")
    drop_path: float = Field(0.0, ge=0, lt=1, description="stochastic depth at the last block")

    initial_std: float = Field(INITIAL_STD, gt=0, le=1, description="attention, MLPs, experts")
    position_std: float = Field(INITIAL_STD, gt=0, le=1, description="of positions, special tokens")

    def grid(self, image: base_model.ImageSpec) -> tuple[int, ...]:
        return tuple(size // self.patch for size in image.shape)


class PatchTransformer(base_model.BackboneModel):
    """``model(images)``: (B, C, *pixels) in [0, 1] to ModelOutput(prediction (B, K), routing)."""

    answers_cells = True
    moves = True

    def __init__(
        self,
        config: TransformerSettings,
        image: base_model.ImageSpec,
        patch_embed: nn.Module,
        moe: MoESettings | None = None,
    ) -> None:
        super().__init__(config, image, moe)
        width, eps = config.width, config.norm_eps
        self.special = special = {"class": 1, "class+distillation": 2, "mean": 0}[config.pooling]
        patches = torch.Size(config.grid(image)).numel()
        check_can_predict_cells(config, image)
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if special >= 1 else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, width)) if special == 2 else None
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + self.positioned_special, width))
        self.norm_pre = nn.LayerNorm(width, eps=eps) if config.pre_norm else nn.Identity()
        rates = layers.drop_path_rates(config.drop_path, config.depth)
        hidden = round(width * config.mlp_ratio)
        build_dense = lambda: layers.DenseMlp(width, hidden, config.activation)
        mlps = build_feed_forwards(moe, width, config.depth, build_dense)
        build_attention = lambda: layers.Attention(width, config.heads, config.qkv_bias)
        self.blocks = nn.ModuleList(
            layers.Block(width, build_attention(), mlp, config.layer_scale, rate, eps)
            for mlp, rate in zip(mlps, rates, strict=True)
        )
        # timm has two names of the last norm: before selecting the head's token, or after the mean
        self.norm = nn.LayerNorm(width, eps=eps) if special else nn.Identity()
        self.fc_norm = nn.Identity() if special else nn.LayerNorm(width, eps=eps)
        self.head = layers.trunc_normal_linear(width, image.outputs)
        self.head_dist = layers.trunc_normal_linear(width, image.outputs) if special == 2 else None
        for token in (self.cls_token, self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=config.position_std)
        scale_initial_weights(self.blocks, config.initial_std / INITIAL_STD)

    @property
    def positioned_special(self) -> int:
        return self.special if self.config.position_on_class else 0

    @property
    def layout(self) -> TokenLayout:
        return TokenLayout(self.special, self.config.grid(self.image), self.image.shape)

    def adapt_weights(
        self,
        weights: base_model.Weights,
        config: Any,
        image: base_model.ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> base_model.Weights:
        """Return weights with learned position embeddings interpolated to this model's grid."""
        if "pos_embed" not in weights:
            return weights
        new = self.config.grid(self.image)
        old = config.grid(image)
        positions = resize_positions(weights["pos_embed"], self.positioned_special, new, mode, old)
        return weights | {"pos_embed": positions}

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        tokens = self.embed(self.normalised(images))
        contexts = self.routing_contexts(images, options)
        records: tuple[RoutingRecord, ...] = ()
        block_features: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            context = contexts.get(index, RoutingContext())
            context = context.with_previous(self.router_wants, records)
            tokens, entering, record = block(tokens, context)
            records += record
            if index in options.blocks:
                block_features[index] = options.select_tokens(entering, tokens)
        tokens = self.norm(tokens)
        return base_model.Encoded(tokens, records, options.select_features(block_features, tokens))

    def embed(self, images: Tensor) -> Tensor:
        """Return tokens with positions (B, T, width) for normalised images."""
        tokens = self.patch_embed(images)
        special = [
            token.expand(len(tokens), -1, -1)
            for token in (self.cls_token, self.dist_token)
            if token is not None
        ]
        if self.config.position_on_class:
            return self.norm_pre(torch.cat([*special, tokens], dim=1) + self.pos_embed)
        return self.norm_pre(torch.cat([*special, tokens + self.pos_embed], dim=1))

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return each head's outputs (B, K), or (B, cells·K) for mosaics, from final tokens."""
        if self.image.task.cells > 1:
            pooled = mean_of_cells(tokens, self.layout.grid, self.image.task.cells)
            return (self.head(self.fc_norm(pooled)).flatten(1),)
        if not self.special:
            return (self.image.task.predict(self.head(self.fc_norm(tokens.mean(dim=1)))),)
        first = self.image.task.predict(self.head(tokens[:, 0]))
        if self.head_dist is None:
            return (first,)
        return first, self.image.task.predict(self.head_dist(tokens[:, 1]))


def scale_initial_weights(blocks: nn.Module, factor: float) -> None:
    """Multiply the initial weights of attention, MLPs and experts (not routers) by ``factor``."""
    weights = dict(blocks.named_parameters())
    for name in weights:
        if name.endswith(DRAWN_SUFFIXES) and ".router." not in name:
            # eigen experts with a factored W2: only its factor ``_inner``, so W2 is scaled once
            weights.get(f"{name}_inner", weights[name]).data.mul_(factor)


def check_can_predict_cells(config: TransformerSettings, image: base_model.ImageSpec) -> None:
    side = math.isqrt(image.task.cells)
    if side == 1:
        return
    if config.pooling != "mean":
        raise UserError.at("model.pooling", found=f"{config.pooling} for mosaics", allowed="mean")
    if any(patches % side for patches in config.grid(image)):
        patch = f"{config.patch} for mosaic cells"
        raise UserError.at("model.patch", found=patch, allowed="a divisor of the size")


def mean_of_cells(tokens: Tensor, grid: tuple[int, ...], cells: int) -> Tensor:
    """Average tokens (B, rows·columns, width) within each cell of a mosaic: (B, cells, width)."""
    side = math.isqrt(cells)
    rows, columns = grid
    placed = tokens.unflatten(1, (side, rows // side, side, columns // side))
    return placed.mean(dim=(2, 4)).flatten(1, 2)

"""What every transformer over patches shares: of images (2 axes) or volumes (3).

B images, C channels, T tokens (special tokens first, then patches, the last axis fastest), K
outputs: classes, or one for a target.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord, TokenLayout
from moecore.nn.backbones.base_model import BackboneModel, Encoded, EncodeOptions, ImageSpec
from moecore.nn.backbones.patch_transformer_base import TransformerSettings
from moecore.nn.layers.block import (
    Attention,
    Block,
    DenseMlp,
    FeedForward,
    drop_rates,
    trunc_normal_linear,
)
from moecore.nn.layers.moe import MoESettings, build_feed_forwards
from moecore.nn.layers.patch_embed import Interpolation, resize_positions


class PatchTransformer(BackboneModel):
    """``model(images)``: (B, C, *pixels) in [0, 1] to ModelOutput(prediction (B, K), routing).

    A prediction of a target is (B, 1) in the target's unit (see Regression in moecore/tasks).
    """

    answers_cells = True
    moves = True

    def __init__(
        self,
        config: TransformerSettings,
        image: ImageSpec,
        patch_embed: nn.Module,
        moe: MoESettings | None = None,
    ) -> None:
        super().__init__(config, image, moe)
        width = config.width
        self.special = special = {"class": 1, "class+distillation": 2, "mean": 0}[config.pooling]
        patches = torch.Size(config.grid(image)).numel()
        check_cells_of_patches(config, image)
        self.patch_embed = patch_embed
        self.cls_token = _special_token(width, special >= 1)
        self.dist_token = _special_token(width, special == 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + self.positioned_tokens, width))
        self.norm_pre = nn.Identity()  # timm's name
        if config.pre_norm:
            self.norm_pre = nn.LayerNorm(width, eps=config.norm_eps)
        rates = drop_rates(config.drop_path, config.depth)
        self.blocks = nn.ModuleList(
            Block(
                width,
                Attention(width, config.heads, config.qkv_bias),
                mlp,
                config.layer_scale,
                rate,
                config.norm_eps,
            )
            for mlp, rate in zip(self._feed_forwards(), rates, strict=True)
        )
        # timm's two names of the last norm: before the head's token is taken, or after the mean
        if special:
            self.norm = nn.LayerNorm(width, eps=config.norm_eps)
            self.fc_norm = nn.Identity()
        else:
            self.norm = nn.Identity()
            self.fc_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head = trunc_normal_linear(width, image.outputs)
        self.head_dist: nn.Linear | None = None
        if special == 2:
            self.head_dist = trunc_normal_linear(width, image.outputs)
        for token in (self.cls_token, self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    @property
    def positioned_tokens(self) -> int:
        """Return how many special tokens have a position embedding."""
        return self.special if self.config.position_on_class else 0

    @property
    def layout(self) -> TokenLayout:
        """Return where the tokens lie in the image."""
        return TokenLayout(self.special, self.config.grid(self.image), self.image.shape)

    def adapt_weights(
        self,
        weights: dict[str, Tensor],
        config: Any,
        image: ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> dict[str, Tensor]:
        """Learned positions are interpolated; fixed ones are no weights."""
        if "pos_embed" not in weights:
            return weights
        new, old = self.config.grid(self.image), config.grid(image)
        positions = resize_positions(weights["pos_embed"], self.positioned_tokens, new, mode, old)
        return weights | {"pos_embed": positions}

    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
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
        return Encoded(tokens, records, options.select_features(block_features, tokens))

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images to (B, T, width) tokens with positions."""
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
        """Final tokens (B, T, width) to outputs (B, K): class head, then distillation head.

        Of mosaics whose cells are answered one by one (B, cells·K).
        """
        if self.image.task.cells > 1:
            pooled = mean_of_cells(tokens, self.layout.grid, self.image.task.cells)
            return (self.head(self.fc_norm(pooled)).flatten(1),)
        if not self.special:
            return (self.image.task.predict(self.head(self.fc_norm(tokens.mean(dim=1)))),)
        first = self.image.task.predict(self.head(tokens[:, 0]))
        if self.head_dist is None:
            return (first,)
        return first, self.image.task.predict(self.head_dist(tokens[:, 1]))

    def _feed_forwards(self) -> list[FeedForward]:
        width = self.config.width
        sizes = (width, round(width * self.config.mlp_ratio), self.config.activation)
        return build_feed_forwards(self.moe, width, self.config.depth, lambda: DenseMlp(*sizes))


def check_cells_of_patches(config: TransformerSettings, image: ImageSpec) -> None:
    """Raise UserError where cells are to be answered one by one and patches do not make them up."""
    side = math.isqrt(image.task.cells)
    if side == 1:
        return
    if config.pooling != "mean":
        problem = f"found {config.pooling}, but the data have a label for each cell of a mosaic"
        raise UserError(f"model.pooling: {problem}; allowed: mean")
    if any(patches % side for patches in config.grid(image)):
        problem = f"found {config.patch}, whose patches do not make up the cells of a mosaic"
        raise UserError(f"model.patch: {problem}; allowed: a divisor of their size")


def mean_of_cells(tokens: Tensor, grid: tuple[int, ...], cells: int) -> Tensor:
    """Return the means (B, cells, width) of the tokens (B, rows·columns, width) of each cell."""
    side = math.isqrt(cells)
    rows, columns = grid
    placed = tokens.unflatten(1, (side, rows // side, side, columns // side))
    return placed.mean(dim=(2, 4)).flatten(1, 2)


def _special_token(width: int, wanted: bool) -> nn.Parameter | None:
    if not wanted:
        return None
    return nn.Parameter(torch.zeros(1, 1, width))

"""Swin transformers, dense or with mixture-of-experts blocks.

Parameter names are timm's but for the head, which is ``head`` (timm: head.fc).
B images, T tokens of a layer's grid, K classes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor, nn
from torch.nn.functional import interpolate

from moecore.core.routing_records import RoutingContext, RoutingRecord, TokenLayout
from moecore.nn.backbones.base_model import BackboneModel, Encoded, EncodeOptions, ImageSpec
from moecore.nn.layers.block import Block, DenseMlp, FeedForward, drop_rates, trunc_normal_linear
from moecore.nn.layers.moe import MoESettings
from moecore.nn.layers.patch_embed import Interpolation, NormedPatchEmbed
from moecore.nn.layers.window_attention import (
    EPS,
    Grid,
    PatchMerging,
    PostNormBlock,
    SwinKind,
    WindowAttention,
    Windows,
)

TABLE = "relative_position_bias_table"


class SwinSettingsLike(Protocol):
    """What the settings of the three kinds say."""

    @property
    def kind(self) -> SwinKind: ...
    @property
    def patch(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def depths(self) -> tuple[int, ...]: ...
    @property
    def depth(self) -> int: ...
    @property
    def heads(self) -> tuple[int, ...]: ...
    @property
    def window(self) -> int: ...
    @property
    def pretrained_windows(self) -> tuple[int, ...] | None: ...
    @property
    def mlp_ratio(self) -> float: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def drop_path(self) -> float: ...

    def grids(self, image: ImageSpec) -> tuple[Grid, ...]:
        """The grid of tokens of each stage."""
        ...


class SwinStage(nn.Module):
    """The merging of 2 × 2 tokens before a stage, none before the first, and its blocks."""

    def __init__(self, downsample: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)


class BlockStage(NamedTuple):
    """Where a block stands."""

    stage: int
    grid: Grid
    width: int


class SwinTransformer(BackboneModel):
    """``model(images)``: (B, C, H, W) in [0, 1] to ModelOutput(prediction (B, K), routing)."""

    moves = True

    def __init__(
        self, config: SwinSettingsLike, image: ImageSpec, moe: MoESettings | None = None
    ) -> None:
        super().__init__(config, image, moe)
        self.places = tuple(self._places())
        self.patch_embed = NormedPatchEmbed(image.channels, config.patch, config.width, EPS)
        blocks = list(self._blocks())
        stages = []
        for stage, depth in enumerate(config.depths):
            before: nn.Module = nn.Identity()
            if stage:
                grid = config.grids(image)[stage - 1]
                width = config.width * 2 ** (stage - 1)
                before = PatchMerging(grid, width, config.kind == "swin_v2")
            stages.append(SwinStage(before, [blocks.pop(0) for _ in range(depth)]))
        self.layers = nn.ModuleList(stages)
        last = self.places[-1].width
        self.norm = nn.LayerNorm(last, eps=EPS)
        self.head = trunc_normal_linear(last, image.outputs)

    @property
    def layout(self) -> TokenLayout:
        """Return where the last stage's tokens lie."""
        return self.layout_of(self.depth - 1)

    def layout_of(self, block: int) -> TokenLayout:
        """Return where a block's tokens lie; those at an odd grid's end reach beyond the image."""
        place = self.places[block]
        side = self.config.patch * 2**place.stage
        return TokenLayout(0, place.grid, tuple(length * side for length in place.grid))

    def width_of(self, block: int) -> int:
        """Width of a block's tokens."""
        return self.places[block].width

    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
        """Return what the blocks make of images; features have their stage's tokens and width."""
        tokens = self.patch_embed(self.normalised(images))
        contexts = self.routing_contexts(images, options)
        records: tuple[RoutingRecord, ...] = ()
        block_features: dict[int, Tensor] = {}
        index = 0
        for stage in cast(Iterable[SwinStage], self.layers):
            tokens = stage.downsample(tokens)
            for block in stage.blocks:
                context = contexts.get(index, RoutingContext())
                context = context.with_previous(self.router_wants, records)
                tokens, entering, record = block(tokens, context)
                records += record
                if index in options.blocks:
                    block_features[index] = options.select_tokens(entering, tokens)
                index += 1
        tokens = self.norm(tokens)
        return Encoded(tokens, records, options.select_features(block_features, tokens))

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens (B, T, width) to the outputs (B, K) of the only head."""
        return (self.image.task.predict(self.head(tokens.mean(dim=1))),)

    def adapt_weights(
        self,
        weights: dict[str, Tensor],
        config: Any,
        image: ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> dict[str, Tensor]:
        """V1's tables of position biases are resized bicubically to other windows."""
        return {name: self._table(name, value, config, image) for name, value in weights.items()}

    def _table(self, name: str, value: Tensor, config: Any, image: ImageSpec) -> Tensor:
        own = dict(self.named_parameters()).get(name)
        if not name.endswith(TABLE) or own is None or own.shape == value.shape:
            return value
        stage = int(name.split(".")[1])
        sizes = config.windows(image)[stage], self.config.windows(self.image)[stage]
        old, new = (tuple(2 * length - 1 for length in size) for size in sizes)
        table = value.t().float().view(1, -1, *old)
        resized = interpolate(table, size=new, mode="bicubic", align_corners=False)
        return resized.flatten(2)[0].t().to(value.dtype)

    def _places(self) -> Iterator[BlockStage]:
        grids = self.config.grids(self.image)
        for stage, (depth, grid) in enumerate(zip(self.config.depths, grids, strict=True)):
            for _ in range(depth):
                yield BlockStage(stage, grid, self.config.width * 2**stage)

    def _blocks(self) -> Iterator[Block]:
        config = self.config
        sparse = () if self.moe is None else self.moe.indices(config.depth)
        rates = drop_rates(config.drop_path, config.depth)
        first = [sum(config.depths[:stage]) for stage in range(len(config.depths))]
        for index, (stage, grid, width) in enumerate(self.places):
            pretrained = None
            if config.pretrained_windows is not None:
                pretrained = (config.pretrained_windows[stage],) * 2
            windows = Windows(grid, config.window, (index - first[stage]) % 2 == 1)
            attention = WindowAttention(
                config.kind, width, config.heads[stage], windows, config.qkv_bias, pretrained
            )
            mlp: FeedForward = DenseMlp(width, int(width * config.mlp_ratio))
            if self.moe is not None and index in sparse:
                mlp = self.moe.build(width)
            if config.kind == "swin_v2":
                yield PostNormBlock(width, attention, mlp, rates[index])
            else:
                yield Block(width, attention, mlp, None, rates[index], EPS)

"""Swin transformers: V1 (Liu et al. 2021), and the base of Swin-MoE and Swin V2.

Parameter names are timm's, except ``head`` (timm: head.fc).
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import interpolate

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord, TokenLayout
from moecore.nn.backbones import base_model
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.layers import block as layers
from moecore.nn.layers import window_attention
from moecore.nn.layers.moe import OptionalMoE
from moecore.nn.layers.patch_embed import Interpolation, NormedPatchEmbed
from moecore.nn.layers.window_attention import EPS

BIAS_TABLE_NAME = "relative_position_bias_table"


class SwinSettings(base_model.Backbone):
    """Settings of Swin V1, Swin-MoE and Swin V2."""

    # windows are free: V1 interpolates positions, and upcycling compares the others' windows
    free_settings: ClassVar[frozenset[str]] = frozenset(
        {"window", "pretrained_windows", "mlp_ratio", "drop_path"}
    )

    kind: window_attention.SwinKind
    patch: int = Field(4, ge=1, description="side of a patch, pixels")
    width: int = Field(96, ge=8, le=2**16, description="in the first stage; doubles per stage")
    depths: tuple[int, ...] = Field((2, 2, 6, 2), min_length=1, description="blocks of each stage")
    heads: tuple[int, ...] = Field((3, 6, 12, 24), min_length=1, description="heads of each stage")
    window: int = Field(7, ge=1, description="side of a window, tokens; a smaller grid: one window")
    pretrained_windows: tuple[int, ...] | None = Field(
        None, description="swin_moe, swin_v2: window of the learned positions, per stage"
    )
    mlp_ratio: layers.HiddenRatio = Field(4.0, description="hidden width of the dense MLP / width")
    qkv_bias: bool = True
    drop_path: float = Field(0.0, ge=0, lt=1, description="stochastic depth at the last block")

    @model_validator(mode="after")
    def _check_stages_and_heads(self) -> Self:
        stages = len(self.depths)
        for name in ("heads", "pretrained_windows"):
            values = getattr(self, name)
            if values is not None and len(values) != stages:
                text = f"{name} has {len(values)} values and depths {stages}"
                raise ValueError(f"{text}; allowed: one for each stage in both")
        if min(self.depths) < 1 or min(self.heads) < 1 or max(self.depths) > 1000:
            raise ValueError("depths and heads: allowed: 1 or more per stage, up to 1000 blocks")
        for stage, heads in enumerate(self.heads):
            if self.width * 2**stage % heads:
                text = f"heads is {heads} in stage {stage + 1}, whose width is "
                raise ValueError(f"{text}{self.width * 2**stage}; allowed: a divisor of it")
        if self.pretrained_windows is not None and self.kind == "swin":
            raise ValueError("pretrained_windows: allowed for swin: null; its table is resized")
        return self

    @property
    def depth(self) -> int:
        return sum(self.depths)

    @property
    def stages(self) -> tuple[int, ...]:
        return self.depths

    def trained_on(self, image: ImageSpec) -> Self:
        """Return a copy with ``pretrained_windows`` of ``image``; self if V1 or if they are set."""
        if self.kind == "swin" or self.pretrained_windows is not None:
            return self
        windows = tuple(max(size) for size in self.windows(image))
        return self.model_copy(update={"pretrained_windows": windows})

    def grid(self, image: ImageSpec) -> window_attention.Grid:
        """Return the grid of tokens of the first stage."""
        return tuple(size // self.patch for size in image.shape)

    def windows(self, image: ImageSpec) -> tuple[window_attention.Grid, ...]:
        """Return the size of each stage's windows, in tokens along each axis."""
        cut = window_attention.window_and_shift
        return tuple(cut(grid, self.window, False)[0] for grid in self.grids(image))

    def grids(self, image: ImageSpec) -> tuple[window_attention.Grid, ...]:
        stage_grids = [self.grid(image)]
        for _ in self.depths[1:]:
            stage_grids.append(window_attention.merged_grid(stage_grids[-1]))
        return tuple(stage_grids)

    def build(self, image: ImageSpec, moe: OptionalMoE = None) -> "SwinTransformer":
        base_model.check_axis_count(self.kind, image, 2)
        smallest = self.patch * 2 ** (len(self.depths) - 1)
        base_model.check_patches_and_heads(image, self.patch, self.width, self.heads[0])
        if min(image.shape) < smallest:
            stages = f"{len(self.depths)} stages with patches of {self.patch} pixels"
            raise UserError.at(
                "model.depths",
                found=f"{stages} for images of {min(image.shape)} pixels",
                allowed=f"images of {smallest} or more, smaller patches, or fewer stages",
            )
        return SwinTransformer(self, image, moe)


class Swin(SwinSettings):
    """Swin V1 (Liu et al. 2021): pre-norm blocks, a table of position biases."""

    kind: Literal["swin"] = "swin"


class SwinStage(nn.Module):
    """A stage: patch merging (except in the first stage), then blocks."""

    def __init__(self, downsample: nn.Module, blocks: list[layers.Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)


class StageGridAndWidth(NamedTuple):
    stage: int
    grid: window_attention.Grid
    width: int


class SwinTransformer(base_model.BackboneModel):
    """``model(images)``: (B, C, H, W) in [0, 1] to ModelOutput(prediction (B, K), routing)."""

    moves = True

    def __init__(self, config: SwinSettings, image: ImageSpec, moe: OptionalMoE = None) -> None:
        super().__init__(config, image, moe)
        self.places = tuple(
            StageGridAndWidth(stage, grid, config.width * 2**stage)
            for stage, grid in enumerate(config.grids(image))
            for _ in range(config.depths[stage])
        )
        self.patch_embed = NormedPatchEmbed(image.channels, config.patch, config.width, EPS)
        blocks = list(self._build_blocks())
        stages = []
        for stage, depth in enumerate(config.depths):
            before: nn.Module = nn.Identity()
            if stage:
                grid = config.grids(image)[stage - 1]
                width = config.width * 2 ** (stage - 1)
                before = window_attention.PatchMerging(grid, width, config.kind == "swin_v2")
            stages.append(SwinStage(before, [blocks.pop(0) for _ in range(depth)]))
        self.layers = nn.ModuleList(stages)
        last = self.places[-1].width
        self.norm = nn.LayerNorm(last, eps=EPS)
        self.head = layers.trunc_normal_linear(last, image.outputs)

    @property
    def layout(self) -> TokenLayout:
        return self.layout_of(self.depth - 1)

    def layout_of(self, block: int) -> TokenLayout:
        """Return the token layout of a block; its grid may extend beyond the image."""
        place = self.places[block]
        side = self.config.patch * 2**place.stage
        return TokenLayout(0, place.grid, tuple(length * side for length in place.grid))

    def width_of(self, block: int) -> int:
        return self.places[block].width

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        """Return the blocks' output; features have their stage's number and width of tokens."""
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
        return base_model.Encoded(tokens, records, options.select_features(block_features, tokens))

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.image.task.predict(self.head(tokens.mean(dim=1))),)

    def adapt_weights(
        self,
        weights: base_model.Weights,
        config: Any,
        image: ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> base_model.Weights:
        """Return weights for other images; V1's tables of position biases are resized."""
        resized = {}
        for name, parameter in self.named_parameters():
            value = weights.get(name, parameter)
            if not name.endswith(BIAS_TABLE_NAME) or parameter.shape == value.shape:
                continue
            stage = int(name.split(".")[1])
            sizes = config.windows(image)[stage], self.config.windows(self.image)[stage]
            old, new = (tuple(2 * length - 1 for length in size) for size in sizes)
            table = value.t().float().view(1, -1, *old)
            table = interpolate(table, size=new, mode="bicubic", align_corners=False)
            resized[name] = table.flatten(2)[0].t().to(value.dtype)
        return weights | resized

    def _build_blocks(self) -> Iterator[layers.Block]:
        config = self.config
        sparse = () if self.moe is None else self.moe.indices(config.depth)
        rates = layers.drop_path_rates(config.drop_path, config.depth)
        first = [sum(config.depths[:stage]) for stage in range(len(config.depths))]
        for index, (stage, grid, width) in enumerate(self.places):
            pretrained = None
            if config.pretrained_windows is not None:
                pretrained = (config.pretrained_windows[stage],) * 2
            windows = window_attention.Windows(grid, config.window, (index - first[stage]) % 2 == 1)
            attention = window_attention.WindowAttention(
                config.kind, width, config.heads[stage], windows, config.qkv_bias, pretrained
            )
            mlp: layers.FeedForward = layers.DenseMlp(width, int(width * config.mlp_ratio))
            if self.moe is not None and index in sparse:
                mlp = self.moe.build(width)
            if config.kind == "swin_v2":
                yield window_attention.PostNormBlock(width, attention, mlp, rates[index])
            else:
                yield layers.Block(width, attention, mlp, None, rates[index], EPS)

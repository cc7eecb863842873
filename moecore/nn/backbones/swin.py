"""Swin V1 (Liu et al. 2021), and the settings that it shares with Swin-MoE's and with V2."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.backbones.swin import SwinTransformer
from moecore.nn.layers.block import HiddenRatio
from moecore.nn.layers.moe import MoESettings
from moecore.nn.layers.window_attention import Grid, SwinKind, merged_grid, window_and_shift


class SwinSettings(Backbone):
    """What the settings of the three kinds have in common."""

    # windows: their positions are interpolated, or count in windows that upcycling compares
    free_settings: ClassVar[frozenset[str]] = frozenset(
        {"window", "pretrained_windows", "mlp_ratio", "drop_path"}
    )

    kind: SwinKind
    patch: int = Field(4, ge=1, description="side of a patch, pixels")
    width: int = Field(
        96, ge=8, le=2**16, description="of a token in the first stage; doubled by each"
    )
    depths: tuple[int, ...] = Field(
        (2, 2, 6, 2), min_length=1, description="number of blocks of each stage"
    )
    heads: tuple[int, ...] = Field(
        (3, 6, 12, 24), min_length=1, description="attention heads of each stage"
    )
    window: int = Field(
        7, ge=1, description="side of a window, tokens; a smaller grid is one window"
    )
    pretrained_windows: tuple[int, ...] | None = Field(
        None, description="swin_moe, swin_v2: each stage's window of the learned positions"
    )
    mlp_ratio: HiddenRatio = Field(
        4.0, gt=0, le=1000, description="hidden width of the dense MLP / width"
    )
    qkv_bias: bool = True
    drop_path: float = Field(
        0.0, ge=0, lt=1, description="stochastic depth: probability at the last block"
    )

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        stages = len(self.depths)
        for name in ("heads", "pretrained_windows"):
            values = getattr(self, name)
            if values is not None and len(values) != stages:
                text = f"{name} has {len(values)} values and depths {stages}"
                raise ValueError(f"{text}; allowed: one for each stage in both")
        if min(self.depths) < 1 or min(self.heads) < 1 or max(self.depths) > 1000:
            raise ValueError(
                "depths and heads: allowed: 1 or more in each stage, up to 1000 blocks"
            )
        for stage, heads in enumerate(self.heads):
            if self.width * 2**stage % heads:
                text = f"heads is {heads} in stage {stage + 1}, whose width is "
                raise ValueError(f"{text}{self.width * 2**stage}; allowed: a divisor of it")
        if self.pretrained_windows is not None and self.kind == "swin":
            raise ValueError("pretrained_windows: allowed for swin: null; its table is resized")
        return self

    @property
    def depth(self) -> int:
        """Number of blocks of all stages."""
        return sum(self.depths)

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of blocks of each stage."""
        return self.depths

    def trained_on(self, image: ImageSpec) -> Self:
        """A continuous bias was learned for the windows that these images had."""
        if self.kind == "swin" or self.pretrained_windows is not None:
            return self
        return self.model_copy(
            update={"pretrained_windows": tuple(max(size) for size in self.windows(image))}
        )

    def grid(self, image: ImageSpec) -> Grid:
        """Patches along each axis of such images: the grid of the first stage."""
        return tuple(size // self.patch for size in image.shape)

    def windows(self, image: ImageSpec) -> tuple[Grid, ...]:
        """The window of each stage, tokens along each axis."""
        return tuple(window_and_shift(grid, self.window, False)[0] for grid in self.grids(image))

    def grids(self, image: ImageSpec) -> tuple[Grid, ...]:
        """The grid of tokens of each stage."""
        stage_grids = [self.grid(image)]
        for _ in self.depths[1:]:
            stage_grids.append(merged_grid(stage_grids[-1]))
        return tuple(stage_grids)

    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> SwinTransformer:
        """The model for such images; UserError where sizes do not fit, for volumes, for text."""
        if len(image.shape) != 2:
            problem = f"model.kind: found {self.kind}, but the images have {len(image.shape)} axes"
            allowed = "language_model" if len(image.shape) == 1 else "vit3d"
            raise UserError(f"{problem}; allowed: {allowed}")
        least = self.patch * 2 ** (len(self.depths) - 1)
        if any(size % self.patch for size in image.shape):
            allowed = f"a divisor of the image size {image.size}"
            raise UserError(f"model.patch: found {self.patch}; allowed: {allowed}")
        if min(image.shape) < least:
            text = f"model.depths: found {len(self.depths)} stages with patches of {self.patch} "
            needed = f"for images of {min(image.shape)} pixels; allowed: images of {least} or more"
            raise UserError(f"{text}pixels {needed}, smaller patches, or fewer stages")
        return SwinTransformer(self, image, moe)


class Swin(SwinSettings):
    """Swin V1 (Liu et al. 2021): pre-norm blocks, a table of position biases."""

    kind: Literal["swin"] = "swin"

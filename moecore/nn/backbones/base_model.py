"""The base classes of backbones (settings) and of the models that they build."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.core.config import Config, Misfits, Part, Surroundings, part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.routing_records import (
    Feature,
    Guidance,
    ModelOutput,
    RoutingContext,
    RoutingRecord,
    TokenLayout,
)
from moecore.nn.correspondence import add_distillation_token_probs
from moecore.nn.layers.moe import MoESettings, update_routers
from moecore.nn.layers.patch_embed import Interpolation, compute_renormalised_embedding, cut_patches
from moecore.tasks.base import Reduction, Task

Weights = dict[str, Tensor]  # of a model, by parameter
MAX_PIXEL = 16.0  # above any image in [0, 1], perturbed or not: larger values are bytes


class ImageSpec(Config):
    """Shape, task and normalisation of the images or volumes that a model is built for."""

    channels: int = Field(ge=1)
    size: int | tuple[int, int, int] | tuple[int] = Field(
        description="height and width of images, pixels; or depth, height and width, voxels; or "
        "tokens per block of text, whose channels are the blocks that are read"
    )
    mean: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    std: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    task: Task = Field(description="what is predicted")
    truth: int = Field(
        default=0,
        ge=0,
        description="number of kinds of tokens, in an additional channel (of text: additional "
        "blocks) that models do not read; 0: none",
    )

    @model_validator(mode="after")
    def _at_least_one_pixel(self) -> Self:
        if min(self.shape) < 1:
            raise ValueError(f"size is {self.size}; allowed: 1 or more along each axis")
        return self

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Self:
        """Return the ImageSpec for the content of card.json; KeyError if a field is missing."""
        fields = cls.model_fields.items()
        return cls(**{key: card[key] for key, info in fields if info.is_required() or key in card})

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels along each axis, two for images, three for volumes; for text words per block."""
        if isinstance(self.size, int):
            return (self.size, self.size)
        return self.size

    @property
    def stored_channels(self) -> int:
        """Number of input channels, with those that hold tokens' true kinds (see ``truth``)."""
        if not self.truth:
            return self.channels
        if len(self.shape) == 1:
            return 2 * self.channels
        return self.channels + 1

    @property
    def outputs(self) -> int:
        """Number of outputs of a head, K."""
        return self.task.outputs

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of the task's outputs; models with equal names can exchange heads."""
        return self.task.answers


def check_patches_and_heads(image: ImageSpec, patch: int, width: int, heads: int) -> None:
    if any(size % patch for size in image.shape):
        size = image.size if isinstance(image.size, int) else list(image.size)
        raise UserError.at("model.patch", found=patch, allowed=f"a divisor of image size {size}")
    if width % heads:
        raise UserError.at("model.heads", found=heads, allowed=f"a divisor of model.width, {width}")


def check_axis_count(kind: str, image: ImageSpec, axes: int) -> None:
    number = len(image.shape)
    if number != axes:
        raise UserError.at(
            "model.kind",
            found=f"{kind}, but the images have {number} axes",
            allowed={1: "language_model", 2: "vit", 3: "vit3d"}[number],
        )


def check_needs_no_attention(kind: str, moe: MoESettings | None) -> None:
    if moe is not None and (lacking := sorted(moe.router.wants & {"attention", "attended"})):
        raise UserError(
            f"model.kind: {kind} has no attention, but the router {moe.router.kind} reads "
            f"{', '.join(lacking)}; choose another model or router"
        )


# ``at``: "mlp_input" the input of a block's feed-forward, "block_out" its output, "final" the
# normalised last tokens.
class EncodeOptions(NamedTuple):
    """Options of ``encode``: which features to return, and additional inputs of routers."""

    at: Feature | None = None
    blocks: tuple[int, ...] = ()  # blocks whose features are returned
    guidance: Guidance | None = None  # a teacher's routing, if routers read it
    progress: float = 1.0  # share of the training that is done

    def select_tokens(self, entering: Tensor, leaving: Tensor) -> Tensor:
        """Return a feed-forward's input if ``at`` is "mlp_input", else the block's output."""
        return entering if self.at == "mlp_input" else leaving

    def select_features(self, blocks: Mapping[int, Tensor], final: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor per requested block: ``final`` if ``at`` is "final", else the block's."""
        return tuple(final if self.at == "final" else blocks[index] for index in self.blocks)


class Encoded(NamedTuple):
    """The output of a backbone's blocks for B inputs of T tokens."""

    tokens: Tensor  # (B, T, width), after the last norm
    routing: tuple[RoutingRecord, ...]  # per MoE layer
    features: tuple[Tensor, ...]  # (B, T, width) per requested block


class Backbone(Part, ABC):
    """Base class of the settings of backbones; ``depth`` is a setting or a property."""

    # Settings that only training reads, or that names and shapes of weights determine: models with
    # equal other settings compute the same function of equal weights (upcycling requires this).
    free_settings: ClassVar[frozenset[str]] = frozenset()
    volumes: ClassVar[bool] = False  # its images have three axes
    captions: ClassVar[bool] = False  # it also reads captions of images
    normalises_experts: ClassVar[bool] = False  # the length of experts' outputs has no effect

    if TYPE_CHECKING:

        @property
        def depth(self) -> int:
            """Number of blocks."""

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, message) if the data do not fit, or drop_path has no effect."""
        if (rate := getattr(self, "drop_path", 0)) and self.depth == 1:
            text = "which grows from 0 at the first block, the only one"
            yield ("drop_path",), f"found {rate:g}, {text}; allowed: 0, or more blocks"
        if around.source is None:
            return
        volumes, captions = around.source.volumes, around.task.of_captions
        if self.volumes != volumes or captions and not self.captions:
            what = "volumes" if volumes else "flat images"
            fitting = [
                kind
                for kind, part in part_classes_by_kind(Backbone).items()
                if part.volumes == volumes and part.captions == captions
            ]
            text = f"found {self.kind}, but {around.data} has {what}"
            text += " with captions" if captions else ""
            yield ("kind",), f"{text}; allowed: {', '.join(fitting)}"

    @abstractmethod
    def grid(self, image: ImageSpec) -> tuple[int, ...]:
        """Return the number of patches along each axis of an image."""

    @abstractmethod
    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> "BackboneModel":
        """Build an untrained model for images like ``image``; UserError if they do not fit."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of blocks per stage; number and width of tokens change only between stages."""
        return (self.depth,)

    def trained_on(self, image: ImageSpec) -> Self:
        """Return settings to load weights trained on ``image`` for other images; default: self."""
        return self


class Model(nn.Module, ABC):
    """``model(images)`` normalises images (B, C, *pixels) in [0, 1] and returns a ModelOutput."""

    head: nn.Module  # maps tokens (B, width) to outputs (B, K)

    def __init__(self, config: Any, image: ImageSpec, moe: MoESettings | None) -> None:
        super().__init__()
        self.config = config
        self.image = image
        self.moe = moe  # None: a dense model

    if TYPE_CHECKING:

        def __call__(self, images: Tensor, *inputs: Any, **options: Any) -> ModelOutput: ...

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of the final tokens; by default a grid without special tokens."""
        return TokenLayout(0, self.config.grid(self.image), self.image.shape)

    @property
    def layouts(self) -> tuple[TokenLayout, ...]:
        """Return the token layout of each MoE layer; () for a dense model."""
        if self.moe is None:
            return ()
        return tuple(map(self.layout_of, self.moe.indices(self.config.depth)))

    def layout_of(self, block: int) -> TokenLayout:
        """Return the token layout of a block; by default equal in all blocks."""
        return self.layout

    def targets(self, labels: Tensor) -> Tensor:
        """Convert labels to the form that the task's loss takes; by default unchanged."""
        return labels

    def task_loss(
        self,
        output: ModelOutput,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the task's loss of an output: a scalar, or (B,) with ``reduction`` "none"."""
        return self.image.task.loss(output.prediction, labels, label_smoothing, reduction)

    def routing_of(self, images: Tensor) -> tuple[RoutingRecord, ...]:
        """Return a routing record per MoE layer; a subclass can skip computing the prediction."""
        return self(images).routing

    def moe_settings_of(self, name: str) -> MoESettings | None:
        """Return MoE settings of the tower or model with this parameter or module; None: dense."""
        return self.moe

    @property
    def router_wants(self) -> frozenset[str]:
        """Names of the RoutingContext fields that the routers read; empty for a dense model."""
        return frozenset() if self.moe is None else self.moe.router.wants

    @property
    def experts_and_router(self) -> MoESettings:
        """Return the settings of the MoE layers; ValueError for a dense model."""
        if self.moe is None:
            raise ValueError("a dense model has neither experts nor a router")
        return self.moe


class BackboneModel(Model):
    """A model built by a backbone: ``model(images, guidance, progress)``.

    guidance: a teacher's routing, if routers read it.  progress: share of the training that is
    done.
    """

    answers_cells: ClassVar[bool] = False  # ``heads`` predict each cell of a mosaic
    moves: ClassVar[bool] = False  # ``adapt_weights`` takes weights of another image size
    pixel_mean: Tensor  # per channel, of images in [0, 1]
    pixel_std: Tensor  # per channel

    def __init__(self, config: Any, image: ImageSpec, moe: MoESettings | None) -> None:
        super().__init__(config, image, moe)
        if moe is not None and "truth" in moe.router.wants and not image.truth:
            raise UserError.at(
                "router.kind",
                found=f"{moe.router.kind}, but the truth of these data's tokens is unknown",
                allowed="data whose card has truth",
            )
        if moe is not None and "words" in moe.router.wants and len(image.shape) > 1:
            raise UserError.at(
                "router.kind",
                found=f"{moe.router.kind}, which reads words; images have none",
                allowed="text, or hash by patch or position",
            )
        if image.task.cells > 1 and not self.answers_cells:
            raise UserError.at("model.kind", found=f"{config.kind} for mosaic cells", allowed="vit")
        axes = [1] * len(image.shape)
        for name, values in (("pixel_mean", image.mean), ("pixel_std", image.std)):
            # not persistent: settings of the model, not weights
            self.register_buffer(name, torch.tensor(values).view(1, -1, *axes), persistent=False)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.config.depth

    def forward(
        self, images: Tensor, guidance: Guidance | None = None, progress: float = 1.0
    ) -> ModelOutput:
        encoded = self.encode(images, EncodeOptions(guidance=guidance, progress=progress))
        heads = self.heads(encoded.tokens)
        return ModelOutput(self.prediction_of(heads), encoded.routing, heads)

    @abstractmethod
    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
        """Return the output of the blocks for images (B, C, *pixels)."""

    def routing_contexts(self, images: Tensor, options: EncodeOptions) -> dict[int, RoutingContext]:
        """Return each MoE block's index → its router's inputs, except attention: blocks add it."""
        if self.moe is None:
            return {}
        router = self.moe.router
        contexts = {}
        for layer, index in enumerate(self.moe.indices(self.depth)):
            layout = self.layout_of(index)
            context = RoutingContext(progress=router.phase(options.progress))
            if "patches" in router.wants:
                channels = self.seen_channels(images)
                context = context._replace(patches=cut_token_pixels(channels, layout))
            if "words" in router.wants:
                context = context._replace(words=images[:, 0].long())
            if "truth" in router.wants:
                context = context._replace(truth=majority_token_kinds(images, layout))
            if options.guidance is not None and "teacher" in router.wants:
                probs = options.guidance.probs[layer]
                tokens = layout.special + prod(layout.grid)
                student = torch.Size((len(images), tokens, probs.shape[-1]))
                context = context._replace(teacher=add_distillation_token_probs(probs, student))
            contexts[index] = context
        return contexts

    def width_of(self, block: int) -> int:
        """Return the width of a block's tokens; by default equal in all blocks."""
        return self.config.width

    def adapt_weights(
        self, weights: Weights, config: Any, image: ImageSpec, mode: Interpolation = "bilinear"
    ) -> Weights:
        """Convert ``weights`` of a model that was trained on ``image`` for this model's images.

        config: that model's settings, of the same kind. mode: how to interpolate position
        embeddings; ValueError if that is impossible.
        """
        return weights

    def renormalise_weights(self, weights: Weights, image: ImageSpec) -> Weights:
        """Adapt ``patch_embed`` of ``weights`` from mean and std of ``image`` to this model's."""
        weight, bias = "patch_embed.proj.weight", "patch_embed.proj.bias"
        if weight not in weights:
            return {}
        old, new = (image.mean, image.std), (self.image.mean, self.image.std)
        patch_weights = compute_renormalised_embedding(weights[weight], weights[bias], old, new)
        return dict(zip((weight, bias), patch_weights, strict=True))

    def remember(self, streams: int, length: int | None = None) -> None:
        """Cache ``streams`` texts' words (0: stop), ``length`` per text; by default do nothing."""

    def beside(self, labels: Tensor) -> tuple[Tensor, ...]:
        """Return additional inputs of ``forward`` in training, from the labels; by default none."""
        return ()

    def begin_finetuning(self) -> None:
        """Freeze the parameters that fine-tuning does not train; by default none."""

    def begin_streams(self) -> None:
        """Clear the cache of earlier text before a new pass over the text; by default nothing."""

    def end_step(self, output: ModelOutput, progress: float) -> None:
        """Update state that has no gradient, such as routers' biases, after each training step."""
        update_routers(self, output.routing, progress)

    @abstractmethod
    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs (B, K) of every head for final tokens (B, T, width)."""

    def predict(self, tokens: Tensor) -> Tensor:
        """Return the prediction (B, K) for final tokens (B, T, width)."""
        return self.prediction_of(self.heads(tokens))

    def prediction_of(self, heads: tuple[Tensor, ...]) -> Tensor:
        """Average the outputs of all heads, (B, K), as DeiT does at inference."""
        if len(heads) == 1:
            return heads[0]
        return torch.stack(heads).mean(dim=0)

    def normalised(self, images: Tensor) -> Tensor:
        """Return (pixels − mean) / std; UserError for integers, wrong shapes or, on CPU, 0..255."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise UserError.at(
                "images",
                found=images.dtype if isinstance(images, Tensor) else type(images).__name__,
                allowed="floating point torch.Tensor in [0, 1]; divide bytes by 255",
            )
        channels = {self.image.channels, self.image.stored_channels}
        if tuple(images.shape[2:]) != self.image.shape or images.shape[1] not in channels:
            axes = ", ".join(["images", str(self.image.channels), *map(str, self.image.shape)])
            raise UserError.at("images", found=f"shape {tuple(images.shape)}", allowed=f"({axes})")
        pixels = self.seen_channels(images)
        is_readable = pixels.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_readable and pixels.numel() and pixels.detach().amax() > MAX_PIXEL:
            raise UserError.at(
                "images",
                found=f"values up to {float(pixels.detach().amax()):g}",
                allowed="floating point in [0, 1]",
            )
        return (pixels - self.pixel_mean) / self.pixel_std

    def seen_channels(self, images: Tensor) -> Tensor:
        """Return images without their channel of true token kinds, if they have one."""
        if self.image.truth:
            return images[:, : self.image.channels]
        return images


def cut_token_pixels(images: Tensor, layout: TokenLayout) -> Tensor:
    """Cut images into each token's pixels, (B, T, pixels); 0 for special tokens."""
    excess = [covered - size for covered, size in zip(layout.size, images.shape[2:], strict=True)]
    padding = [side for length in reversed(excess) for side in (0, length)]
    sides = [covered // patches for covered, patches in zip(layout.size, layout.grid, strict=True)]
    return pad(cut_patches(pad(images, padding), sides), (0, 0, layout.special, 0))


def majority_token_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's most frequent true kind (last channel), int64 (B, T); 0 if unknown."""
    if images.ndim == 3:
        return images[:, -1].long()
    return (cut_token_pixels(images[:, -1:], layout).mode(dim=-1).values * 255).round().long()


def count_total_and_active_parameters(model: Model) -> dict[str, int]:
    """Return two counts by name: ``parameters`` and ``active_parameters``, which one token uses."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0.0
    for name, parameter in model.named_parameters():
        moe = model.moe_settings_of(name)
        if moe is not None and (".experts." in name or ".zero_computation." in name):
            idle += parameter.numel() * (1 - moe.active_share)
    return {"parameters": total, "active_parameters": total - round(idle)}

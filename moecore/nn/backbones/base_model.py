"""What the models of all backbones have: their images, what they return, and how large they are."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import pad

from moecore.core.config import Config, Part, part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.routing_records import (
    Feature,
    Guidance,
    ModelOutput,
    RoutingContext,
    RoutingRecord,
    TokenLayout,
)
from moecore.core.surroundings import Misfits, Surroundings
from moecore.nn.correspondence import align_teacher_probs
from moecore.nn.layers.moe import MoESettings, update_routers
from moecore.nn.layers.patch_embed import Interpolation, cut_patches, renormalise_patch_embedding
from moecore.tasks.base import Reduction, Task

BYTES_FROM = 16.0  # a pixel value that no image in [0, 1] comes near, whatever was added to it


class ImageSpec(Config):
    """Shape, task and normalisation of the images or volumes that a model is built for."""

    channels: int = Field(ge=1)
    size: int | tuple[int, int, int] | tuple[int] = Field(
        description="height and width of images, pixels; or depth, height and width, voxels; or "
        "tokens of a block of text, whose channels are the blocks that are read"
    )
    mean: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    std: tuple[float, ...] = Field(description="per channel, of images in [0, 1]")
    task: Task = Field(description="what is predicted of them")
    truth: int = Field(
        0,
        ge=0,
        description="kinds of tokens that one channel more names, of text a second row of blocks, "
        "unseen by models; 0: none",
    )

    @model_validator(mode="after")
    def _at_least_one_pixel(self) -> Self:
        if min(self.shape) < 1:
            raise ValueError(f"size is {self.size}; allowed: 1 or more along each axis")
        return self

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Self:
        """The images that a data card describes; KeyError where it lacks a field."""
        fields = cls.model_fields.items()
        return cls(
            **{name: card[name] for name, field in fields if field.is_required() or name in card}
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels along each axis: two axes for images, three for volumes, one for text."""
        if isinstance(self.size, int):
            return (self.size, self.size)
        return self.size

    @property
    def stored_channels(self) -> int:
        """Channels of an image as it is stored and handed to a model."""
        if not self.truth:
            return self.channels
        return 2 * self.channels if len(self.shape) == 1 else self.channels + 1

    @property
    def outputs(self) -> int:
        """Numbers that a head gives."""
        return self.task.outputs

    @property
    def answers(self) -> tuple[str, ...]:
        """Return what is asked; models with the same answers may exchange their heads."""
        return self.task.answers


def check_patches_and_heads(image: ImageSpec, patch: int, width: int, heads: int) -> None:
    """Raise UserError where patches do not tile the images or heads do not divide the width."""
    if any(size % patch for size in image.shape):
        if isinstance(image.size, int):
            size = image.size
        else:
            size = list(image.size)
        raise UserError(f"model.patch: found {patch}; allowed: a divisor of the image size {size}")
    if width % heads:
        raise UserError(f"model.heads: found {heads}; allowed: a divisor of model.width = {width}")


class EncodeOptions(NamedTuple):
    """What ``encode`` gives beside the final tokens, and what routers may look at.

    ``at``: "mlp_input" the input of a block's feed-forward, "block_out" its output, "final" the
    normalised last tokens.
    """

    at: Feature | None = None
    blocks: tuple[int, ...] = ()  # whose features are wanted
    guidance: Guidance | None = None  # a teacher's, for routers that want it
    progress: float = 1.0  # share of the training that is done

    def select_tokens(self, entering: Tensor, leaving: Tensor) -> Tensor:
        """Return the tokens that enter a feed-forward or leave the block, as ``at`` says."""
        return entering if self.at == "mlp_input" else leaving

    def select_features(self, blocks: Mapping[int, Tensor], final: Tensor) -> tuple[Tensor, ...]:
        """Return the features of each wanted block, of those that were read of ``blocks``."""
        return tuple(final if self.at == "final" else blocks[index] for index in self.blocks)


class Encoded(NamedTuple):
    """What the blocks of a backbone make of B inputs, T tokens each."""

    tokens: Tensor  # (B, T, width), the final ones
    routing: tuple[RoutingRecord, ...]
    features: tuple[Tensor, ...]  # (B, T, width) of each block of the options


class Backbone(Part, ABC):
    """The settings of a backbone, a family of parts; ``depth`` is a setting or a property."""

    # Names of settings that training alone reads, or that weights show by names and shapes: models
    # that are equal in all others compute the same with the same weights (upcycling goes by it)
    free_settings: ClassVar[frozenset[str]] = frozenset()
    volumes: ClassVar[bool] = False  # it takes images of three axes
    captions: ClassVar[bool] = False  # it reads captions beside images
    normalises_experts: ClassVar[bool] = False  # the length of their outputs is lost

    if TYPE_CHECKING:

        @property
        def depth(self) -> int:
            """Number of blocks."""

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a model of other data, and layers that are dropped of one block."""
        if getattr(self, "drop_path", 0) and self.depth == 1:
            text = "which grows from 0 at the first block, the only one"
            dropped = getattr(self, "drop_path", 0)
            yield ("drop_path",), f"found {dropped:g}, {text}; allowed: 0, or more blocks"
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
        """Return how many patches lie along each axis of an image."""

    @abstractmethod
    def build(self, image: ImageSpec, moe: MoESettings | None = None) -> "BackboneModel":
        """Return the model for such images; UserError where there is none."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of blocks of each stage, in which tokens keep their number and width."""
        return (self.depth,)

    def trained_on(self, image: ImageSpec) -> Self:
        """The settings of a model that was trained on such images and goes on with others."""
        return self


class Model(nn.Module, ABC):
    """``model(images)`` with images (B, C, *pixels) in [0, 1] gives a ModelOutput.

    config: the backbone's settings.  moe: None for a dense model.  Normalisation lies inside.
    """

    head: nn.Module

    def __init__(self, config: Any, image: ImageSpec, moe: MoESettings | None) -> None:
        super().__init__()
        self.config = config
        self.image = image
        self.moe = moe

    @property
    def layout(self) -> TokenLayout:
        """Return where the tokens lie: patches alone, unless the backbone says more."""
        return TokenLayout(0, self.config.grid(self.image), self.image.shape)

    @property
    def layouts(self) -> tuple[TokenLayout, ...]:
        """Return where the tokens of each MoE layer lie; none of a dense model."""
        if self.moe is None:
            return ()
        return tuple(map(self.layout_of, self.moe.indices(self.config.depth)))

    def layout_of(self, block: int) -> TokenLayout:
        """Return where a block's tokens lie: in all blocks alike, unless the backbone says more."""
        return self.layout

    def targets(self, labels: Tensor) -> Tensor:
        """Return what predictions are compared with: labels, unless the model reads them."""
        return labels

    def task_loss(
        self,
        output: ModelOutput,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the task's loss of an output, as ``Task.loss``; a model may learn its labels in a
        form of its own.
        """
        task = self.image.task
        return task.loss(output.prediction, labels, label_smoothing, reduction)

    def routing_of(self, images: Tensor) -> tuple[RoutingRecord, ...]:
        """The routing records of images, where nobody asks for predictions."""
        return self(images).routing

    def moe_settings_of(self, name: str) -> MoESettings | None:
        """Return the settings of the MoE layer with the parameter or module of this name."""
        return self.moe

    def share_of(self, name: str) -> float:
        """Share of the experts' parameter of this name that a token uses."""
        moe = self.moe_settings_of(name)
        return 1.0 if moe is None else moe.active_share

    @property
    def router_wants(self) -> frozenset[str]:
        """Return the fields of RoutingContext that its routers read."""
        return frozenset() if self.moe is None else self.moe.router.wants

    @property
    def experts_and_router(self) -> MoESettings:
        """The settings of its MoE layers. Raises ValueError for a dense model."""
        if self.moe is None:
            raise ValueError("a dense model has neither experts nor a router")
        return self.moe


class BackboneModel(Model):
    """A model that a backbone built: ``model(images, guidance, progress)``.

    guidance: a teacher's, for routers that want it.  progress: share of the training that is done.
    """

    answers_cells: ClassVar[bool] = False  # whether ``heads`` answer each cell of a mosaic
    moves: ClassVar[bool] = False  # whether ``adapt_weights`` knows weights of another image size
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: Any, image: ImageSpec, moe: MoESettings | None) -> None:
        super().__init__(config, image, moe)
        if moe is not None and "truth" in moe.router.wants and not image.truth:
            problem = f"found {moe.router.kind}, but nobody knows the truth of these data's tokens"
            raise UserError(f"router.kind: {problem}; allowed: data whose card says truth")
        if moe is not None and "words" in moe.router.wants and len(image.shape) > 1:
            problem = f"found {moe.router.kind}, which reads words; images have none"
            raise UserError(f"router.kind: {problem}; allowed: text, or hash by patch or position")
        if image.task.cells > 1 and not self.answers_cells:
            problem = f"found {config.kind}, which does not answer the cells of a mosaic"
            raise UserError(f"model.kind: {problem}; allowed: vit, or another form of data")
        axes = [1] * len(image.shape)
        for name, values in (("pixel_mean", image.mean), ("pixel_std", image.std)):
            # not persistent: they are settings of the model, not weights
            buffer = torch.tensor(values).view(1, -1, *axes)
            self.register_buffer(name, buffer, persistent=False)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.config.depth

    def forward(
        self, images: Tensor, guidance: Guidance | None = None, progress: float = 1.0
    ) -> ModelOutput:
        """``guidance``: a teacher's; ``progress``: share of the training that is done."""
        encoded = self.encode(images, EncodeOptions(guidance=guidance, progress=progress))
        heads = self.heads(encoded.tokens)
        return ModelOutput(average_head_predictions(heads), encoded.routing, heads)

    @abstractmethod
    def encode(self, images: Tensor, options: EncodeOptions = EncodeOptions()) -> Encoded:
        """Return what the blocks make of images (B, C, *pixels)."""

    def routing_contexts(self, images: Tensor, options: EncodeOptions) -> dict[int, RoutingContext]:
        """Return what routers may look at, by block; the block adds the attention."""
        if self.moe is None:
            return {}
        router = self.moe.router
        contexts = {}
        for layer, index in enumerate(self.moe.indices(self.depth)):
            layout = self.layout_of(index)
            context = RoutingContext(progress=router.phase(options.progress))
            if "patches" in router.wants:
                seen = self.seen_channels(images)
                context = context._replace(patches=pixels_of_tokens(seen, layout))
            if "words" in router.wants:
                context = context._replace(words=images[:, 0].long())
            if "truth" in router.wants:
                context = context._replace(truth=majority_token_kinds(images, layout))
            if options.guidance is not None and "teacher" in router.wants:
                probs = options.guidance.probs[layer]
                tokens = layout.special + prod(layout.grid)
                student = torch.Size((len(images), tokens, probs.shape[-1]))
                context = context._replace(teacher=align_teacher_probs(probs, student))
            contexts[index] = context
        return contexts

    def width_of(self, block: int) -> int:
        """Width of a block's tokens: in all blocks alike, unless the backbone says more."""
        return self.config.width

    def adapt_weights(
        self,
        weights: dict[str, Tensor],
        config: Any,
        image: ImageSpec,
        mode: Interpolation = "bilinear",
    ) -> dict[str, Tensor]:
        """The ``weights`` of a model of this backbone, with the settings ``config`` and for
        ``image``, as they are for the images of this one: positions are interpolated.

        Raises ValueError where that cannot be.
        """
        return weights

    def renormalise_weights(
        self, weights: dict[str, Tensor], image: ImageSpec
    ) -> dict[str, Tensor]:
        """Return the ``weights`` that change with the statistics that pixels are normalised by:
        those of a patch embedding ``patch_embed``, where there is one.
        """
        weight, bias = "patch_embed.proj.weight", "patch_embed.proj.bias"
        if weight not in weights:
            return {}
        old, new = (image.mean, image.std), (self.image.mean, self.image.std)
        patch_weights = renormalise_patch_embedding(weights[weight], weights[bias], old, new)
        return dict(zip((weight, bias), patch_weights, strict=True))

    def remember(self, streams: int, length: int | None = None) -> None:
        """Keep what so many streams of this length leave from step to step; 0: nothing."""

    def beside(self, labels: Tensor) -> tuple[Tensor, ...]:
        """Return what a training step hands to the model behind (images, guidance, progress)."""
        return ()

    def begin_finetuning(self) -> None:
        """Freeze what stays as it was pretrained."""

    def begin_streams(self) -> None:
        """Streams begin anew: forget what they left."""

    def end_step(self, output: ModelOutput, progress: float) -> None:
        """Update what the optimiser does not, after each of its steps; on every rank.

        output: of the step's forward pass.  progress: share of the training that is done.
        """
        update_routers(self, output.routing, progress)

    @abstractmethod
    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Final tokens to the outputs (B, K) of every head."""

    def predict(self, tokens: Tensor) -> Tensor:
        """Final tokens to outputs (B, K), averaged over the heads (as DeiT does at inference)."""
        return average_head_predictions(self.heads(tokens))

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] to the scale that the model was trained at.

        Raises UserError for integers, for images of other axes or channels and, on the CPU, where a
        look costs no wait, for floats that are bytes.
        """
        if not images.is_floating_point():
            allowed = "floating point in [0, 1]; divide bytes by 255"
            raise UserError(f"images: found {images.dtype}; allowed: {allowed}")
        channels = {self.image.channels, self.image.stored_channels}
        if images.ndim != 2 + len(self.image.shape) or images.shape[1] not in channels:
            axes = ", ".join(["images", str(self.image.channels), *map(str, self.image.shape)])
            raise UserError(f"images: found a shape of {tuple(images.shape)}; allowed: ({axes})")
        seen = self.seen_channels(images)
        is_seen = seen.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_seen and seen.numel() and seen.detach().amax() > BYTES_FROM:
            highest = f"found values up to {float(seen.detach().amax()):g}"
            raise UserError(f"images: {highest}; allowed: floating point in [0, 1]")
        return (seen - self.pixel_mean) / self.pixel_std

    def seen_channels(self, images: Tensor) -> Tensor:
        """Return images without the channel that says the truth, where there is one."""
        return images[:, : self.image.channels] if self.image.truth else images


def pixels_of_tokens(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return the pixels (B, T, pixels) of each token; 0 beyond the image and of special ones."""
    sizes = images.shape[2:]
    beyond = [covered - size for covered, size in zip(layout.size, sizes, strict=True)]
    padding = [side for length in reversed(beyond) for side in (0, length)]
    sides = [covered // patches for covered, patches in zip(layout.size, layout.grid, strict=True)]
    return pad(cut_patches(pad(images, padding), sides), (0, 0, layout.special, 0))


def majority_token_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return int64 (B, T): which kind most of each token is of; images in [0, 1], last channel.

    0 where nothing is said: of special tokens, and of what lies beyond the image. The last channel
    of text (B, C, M) is the kinds of its last block.
    """
    if images.ndim == 3:
        return images[:, -1].long()
    return (pixels_of_tokens(images[:, -1:], layout).mode(dim=-1).values * 255).round().long()


def average_head_predictions(heads: tuple[Tensor, ...]) -> Tensor:
    """Return the prediction of all heads; one head's own bits."""
    if len(heads) == 1:
        return heads[0]
    return torch.stack(heads).mean(dim=0)


def parameter_counts(model: Model) -> dict[str, int]:
    """All parameters, and those that one token uses: of E experts only the k that are chosen."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = sum(
        parameter.numel() * (1 - model.share_of(name))
        for name, parameter in model.named_parameters()
        if ".experts." in name or ".zero_computation." in name
    )
    return {"parameters": total, "active_parameters": total - round(idle)}

"""SFCN, the Simple Fully Convolutional Network for brain age (six convolutions).

B volumes, C channels, D × H × W voxels, T voxels of the last map (each a cube of 32³ voxels), K
bins. Source: Peng et al. 2021, and their code (github.com/ha-ha-ha-han/UKBiobank_deep_pretrain).
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, softmax

from moecore.core.config import Misfits, Surroundings, list_idle_misfits
from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingContext
from moecore.nn.backbones import base_model
from moecore.nn.layers.block import Dropout
from moecore.nn.layers.moe import MoESettings
from moecore.tasks import base, regression


class Sfcn(base_model.Backbone):
    """Settings of a Simple Fully Convolutional Network for brain age; defaults as published."""

    free_settings: ClassVar[frozenset[str]] = frozenset({"dropout", "bin_deviation"})

    volumes: ClassVar[bool] = True

    kind: Literal["sfcn"] = "sfcn"
    channels: tuple[int, ...] = Field(
        (32, 64, 128, 256, 256, 64), min_length=3, description="all but the last halve the volume"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout before the head")
    head: Literal["bins", "number"] = Field(
        "bins", description="probabilities of bins of the label, or the task's outputs"
    )
    first_bin: float = Field(42.0, description="lower edge of the first bin, in the label's unit")
    bin_width: float = Field(1.0, gt=0, description="width of a bin, in the label's unit")
    bins: int = Field(40, ge=2, description="number of bins")
    bin_deviation: float = Field(1.0, gt=0, description="σ of a label's distribution, in its unit")

    @property
    def depth(self) -> int:
        """Number of layers that can have experts: 1, before the last convolution, of kernel 1³."""
        return 1

    @property
    def cube_side(self) -> int:
        """Side, in input voxels, of the cube that a voxel of the last feature map covers."""
        return 2 ** (len(self.channels) - 1)

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if self.head != "bins":
            names = ("first_bin", "bin_width", "bins", "bin_deviation")
            yield from list_idle_misfits(self, names, f"the head is a {self.head}", "head: bins")

    def grid(self, image: base_model.ImageSpec) -> tuple[int, ...]:
        return tuple(size // self.cube_side for size in image.shape)

    def build(
        self, image: base_model.ImageSpec, moe: MoESettings | None = None
    ) -> "ConvolutionalNetwork":
        base_model.check_axis_count(self.kind, image, 3)
        if any(size % self.cube_side for size in image.shape):
            raise UserError(
                f"model.kind: found sfcn, whose {len(self.channels)} layers need multiples of "
                f"{self.cube_side} voxels along each axis; the volumes have {list(image.shape)} "
                "(set `size` of the data)"
            )
        if self.head == "bins" and not isinstance(image.task, regression.Regression):
            raise UserError.at("model.head", found=f"bins for {image.task.kind}", allowed="number")
        base_model.check_needs_no_attention(self.kind, moe)
        return ConvolutionalNetwork(self, image, moe)


# With bins, ``heads`` are their logits (B, K), and the prediction (B, 1) is the mean of bins under
# their probabilities, in the label's unit. A dense model is the published network; with experts, x
# + moe(norm(x)) precedes the last convolution.
class ConvolutionalNetwork(base_model.BackboneModel):
    """``model(volumes)`` with volumes (B, C, D, H, W) in [0, 1] returns a ModelOutput."""

    edges: Tensor

    def __init__(
        self, config: Sfcn, image: base_model.ImageSpec, moe: MoESettings | None = None
    ) -> None:
        super().__init__(config, image, moe)
        *halving, last = config.channels
        inputs = (image.channels, *halving[:-1])
        blocks = (_halving_block(*widths) for widths in zip(inputs, halving, strict=True))
        self.features = nn.Sequential(*blocks)
        self.width = halving[-1]
        self.norm = nn.Identity()
        self.moe_layer = None
        if moe is not None and moe.indices(config.depth):
            self.norm = nn.LayerNorm(self.width)
            self.moe_layer = moe.build(self.width)
        self.last = nn.Sequential(nn.Conv3d(self.width, last, 1), nn.BatchNorm3d(last), nn.ReLU())
        self.dropout = Dropout(config.dropout)
        self.head = nn.Linear(last, config.bins if config.head == "bins" else image.outputs)
        edges = config.first_bin + config.bin_width * torch.arange(config.bins + 1.0)
        self.register_buffer("edges", edges, persistent=False)

    def width_of(self, block: int) -> int:
        return self.width

    def encode(
        self, images: Tensor, options: base_model.EncodeOptions = base_model.EncodeOptions()
    ) -> base_model.Encoded:
        """Return the last feature map as tokens, and features before and after the experts."""
        volume = self.features(self.normalised(images))
        grid = volume.shape[2:]
        entering = leaving = volume.flatten(2).transpose(1, 2)
        records = ()
        if self.moe_layer is not None:
            contexts = self.routing_contexts(images, options)
            entering = self.norm(leaving)
            change, records = self.moe_layer(entering, contexts.get(0, RoutingContext()))
            leaving = leaving + change
        tokens = self.last(leaving.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
        blocks = dict.fromkeys(options.blocks, options.select_tokens(entering, leaving))
        return base_model.Encoded(tokens, records, options.select_features(blocks, tokens))

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the logits (B, K) of bins, or the task's outputs, for tokens (B, T, channels)."""
        output = self.head(self.dropout(tokens.mean(dim=1)))
        if self.config.head == "bins":
            return (output.float(),)
        return (self.image.task.predict(output),)

    def task_loss(
        self,
        output: ModelOutput,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: base.Reduction = "mean",
    ) -> Tensor:
        """Return the task's loss or, if the head predicts bins, KL(soft label ‖ bins) in nats."""
        if self.config.head == "number":
            return super().task_loss(output, labels, label_smoothing, reduction)
        if label_smoothing:
            raise UserError.at(
                "label_smoothing",
                found=f"{label_smoothing}, but labels over bins are smooth (model.bin_deviation)",
                allowed="0",
            )
        target_probs = soft_labels(labels, self.edges, self.config.bin_deviation)
        log_probs = log_softmax(output.heads[0], dim=1)
        losses = kl_div(log_probs, target_probs, reduction="none").sum(dim=1)
        return losses.mean() if reduction == "mean" else losses

    def prediction_of(self, heads: tuple[Tensor, ...]) -> Tensor:
        """Return the predicted number (B, 1): the head's, or the expectation over bins."""
        if self.config.head == "number":
            return heads[0]
        return (softmax(heads[0], dim=1) @ ((self.edges[:-1] + self.edges[1:]) / 2))[:, None]


def soft_labels(labels: Tensor, edges: Tensor, deviation: float) -> Tensor:
    """Return probabilities (B, K) of N(label, ``deviation``²) in K bins with these K + 1 edges."""
    # the outer bins get the probability outside the outer edges: rows sum to 1
    distances = (edges[None, 1:-1] - labels.float()[:, None]) / (deviation * math.sqrt(2))
    below = (1 + torch.erf(distances)) / 2
    ends = below.new_zeros(len(labels), 1)
    return torch.cat([ends, below, ends + 1], dim=1).diff(dim=1)


def _halving_block(channels: int, width: int) -> nn.Sequential:
    convolution = nn.Conv3d(channels, width, kernel_size=3, padding=1)
    # channels last: a step on the CPU takes 2/3 of the time
    convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last_3d)
    return nn.Sequential(convolution, nn.BatchNorm3d(width), nn.MaxPool3d(2), nn.ReLU())

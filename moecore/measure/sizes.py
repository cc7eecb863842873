"""Models of the sizes that the papers print, built without memory: parameters and FLOPs.

On torch's meta device a tensor has a shape and no values, so a model of a billion parameters is
built, and a forward pass through it or a training step counted, in a tenth of a second. Nothing is
trained.
"""

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec, parameter_counts
from moecore.nn.meta_device import meta_device_context
from moecore.tasks.classification import Classification
from moecore.training.meter import LiveBytes, live_training_tensors
from moecore.training.method import Method


class PaperModel(Config):
    """One model, as a paper describes it."""

    name: str = Field(description="what it is called here; each once")
    reported: str = Field("", description="its name among the papers' costs; empty for none there")
    model: Backbone | None = Field(
        None, description="null for one that cannot be built here: see needs"
    )
    method: Method = Field(Method(), description="router, experts and blocks; {} is dense")
    size: int = Field(224, ge=1, description="height and width of its images, pixels")
    classes: int = Field(1000, ge=2, description="of its head")
    batch: int = Field(
        0, ge=0, description="images of a training step, whose memory is counted; 0: not counted"
    )
    teacher_width: int = Field(
        0, ge=0, description="of a teacher whose routers are counted too; 0: none"
    )
    needs: str = Field("", description="what it would take to build it")
    why: str = Field("", description="where ours differs from the paper's, in words")

    @model_validator(mode="after")
    def _built_or_why_not(self) -> Self:
        if (self.model is None) != bool(self.needs):
            raise ValueError(f"{self.name} has both of `model` and `needs`, or none; allowed: one")
        return self


class Sizes(Config):
    """Which models are built."""

    models: tuple[PaperModel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [one.name for one in self.models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"models has {twice} twice; allowed: each name once")
        return self


class SizeRow(Config):
    """What one model came to; None where it cannot be built here."""

    name: str
    reported: str
    parameters: int | None = None  # the routers of its teacher among them
    active_parameters: int | None = None  # that a token uses
    flops_per_image: float | None = None  # a multiplication and an addition count as two
    routing_flops_per_layer: float | None = None  # of an image, in one MoE layer; the mean
    training_memory_bytes: int | None = None  # that a step with AdamW holds at most, in fp32
    needs: str = ""
    why: str = ""


class Result(Config):
    """One row a model, in the order of the settings."""

    rows: tuple[SizeRow, ...]


def measure(settings: Sizes) -> Result:
    """Every model. Raises UserError where its sizes do not fit together."""
    return Result(rows=tuple(count_sized_model(one) for one in settings.models))


def count_sized_model(one: PaperModel) -> SizeRow:
    """The counts of one model; a teacher routes in training only, so its routers are not active."""
    told = {"name": one.name, "reported": one.reported, "needs": one.needs, "why": one.why}
    if one.model is None:
        return SizeRow(**told)
    model = build_on_meta(one)
    counts = parameter_counts(model)
    layers = 0
    if model.moe is not None:
        layers = len(model.moe.indices(one.model.depth))
        counts["parameters"] += one.teacher_width * model.moe.experts.choices * layers
    pixels = torch.empty(1, model.image.channels, *model.image.shape, device="meta")
    flops = whole_and_routing_flops(model, pixels)
    memory = None
    if one.batch:
        memory = training_step_memory(model, pixels.expand(one.batch, *pixels.shape[1:]))
    return SizeRow(
        **told,
        **counts,
        flops_per_image=flops.whole,
        routing_flops_per_layer=flops.routing / layers if layers else None,
        training_memory_bytes=memory,
    )


def training_step_memory(model: BackboneModel, pixels: Tensor) -> int:
    """Return the most bytes that a training step with AdamW holds, weights and images among them.

    model, pixels (B, C, H, W): on the meta device. Of the second step, when there are gradients
    and moments; without regularizers, which the papers' memory does not tell apart.
    """
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    pixels = pixels.contiguous()

    def run_step() -> None:
        model(pixels).prediction.logsumexp(dim=-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    with meta_device_context():
        run_step()
        with LiveBytes(live_training_tensors([model], optimizer, pixels)) as live:
            run_step()
    return live.peak


def build_on_meta(one: PaperModel) -> BackboneModel:
    """The model on the meta device, for colour images."""
    assert one.model is not None
    image = ImageSpec(
        channels=3,
        size=one.size,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        task=Classification(classes=tuple(map(str, range(one.classes)))),
    )
    with torch.device("meta"):
        return one.model.build(image, one.method.moe)

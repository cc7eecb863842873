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
from moecore.measure.base import MeasuredPart
from moecore.measure.forward_cost import whole_and_routing_flops
from moecore.measure.values import Found, Metric, Value
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec, parameter_counts
from moecore.nn.meta_device import meta_device_context
from moecore.tasks.classification import Classification
from moecore.training.meter import LiveBytes, live_training_tensors
from moecore.training.method import Method

METRICS = {
    "parameters": Metric("Parameters, M", form="count", over="model"),  # with a teacher's routers
    "active_parameters": Metric("Active, M", form="count", over="model"),  # that a token uses
    "gflops": Metric("GFLOPs", over="model"),  # a multiplication and an addition count as two
    "routing_gflops": Metric("Routing of a layer, GFLOPs", over="model"),  # mean over MoE layers
    "training_memory_mb": Metric("Training step, GB", over="model"),  # most with AdamW, in fp32
}


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


class Sizes(MeasuredPart):
    """Which models are built."""

    metrics = METRICS

    models: tuple[PaperModel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [one.name for one in self.models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"models has {twice} twice; allowed: each name once")
        return self


def measure(settings: Sizes) -> Found:
    """Count every model. Raises UserError where its sizes do not fit together.

    facts: models, by name in the order of the settings, with what they say in words.
    """
    values = [
        Value(metric=metric, at={"model": one.name}, value=number)
        for one in settings.models
        for metric, number in count_sized_model(one).items()
    ]
    words = {"name", "reported", "needs", "why"}
    models = [one.model_dump(include=words) for one in settings.models]
    return Found(values=values, facts={"models": models})


def count_sized_model(one: PaperModel) -> dict[str, float]:
    """Return the metrics of one model, none where it cannot be built here; a teacher routes in
    training only, so its routers are not active.
    """
    if one.model is None:
        return {}
    model = build_on_meta(one)
    counts: dict[str, float] = {**parameter_counts(model)}
    layers = 0
    if model.moe is not None:
        layers = len(model.moe.indices(one.model.depth))
        counts["parameters"] += one.teacher_width * model.moe.experts.choices * layers
    pixels = torch.empty(1, model.image.channels, *model.image.shape, device="meta")
    flops = whole_and_routing_flops(model, pixels)
    counts["gflops"] = flops.whole * 1e-9
    if layers:
        counts["routing_gflops"] = flops.routing / layers * 1e-9
    if one.batch:
        batch = pixels.expand(one.batch, *pixels.shape[1:])
        counts["training_memory_mb"] = training_step_memory(model, batch) * 1e-6
    return counts


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

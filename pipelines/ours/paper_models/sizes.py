"""Parameters, FLOPs and memory of models of the papers' sizes; nothing is trained.

A tensor on torch's meta device has a shape but no values, so that a model of a billion parameters
is built and a forward pass or training step is counted in a tenth of a second.
"""

from functools import cache
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Misfits
from moecore.measure.cost import whole_and_routing_flops
from moecore.nn.backbones.base_model import count_total_and_active_parameters
from moecore.nn.predict import meta_device_context
from moecore.parts import (
    Backbone,
    BackboneModel,
    Calculation,
    Classification,
    Config,
    ImageSpec,
    Metric,
    OnPage,
    Surroundings,
    Values,
)
from moecore.training.meter import LiveBytesCounter, live_training_tensors
from moecore.training.method import Method

METRICS = {
    "parameters": Metric(
        "Parameters, M", form="count", over="model", detail=True
    ),  # with a teacher's routers
    "active_parameters": Metric(
        "Active, M", form="count", over="model", detail=True
    ),  # that a token uses
    "gflops": Metric(
        "GFLOPs", over="model", detail=True
    ),  # a multiplication and an addition count as two
    "routing_gflops": Metric(
        "Routing of a layer, GFLOPs", over="model", detail=True
    ),  # mean over MoE layers
    "training_memory_mb": Metric(
        "Training step, GB", over="model", detail=True
    ),  # most with AdamW, in fp32
}


class PaperModel(Config):
    """A model as a paper describes it."""

    name: str = Field(description="unique name")
    reported: str = Field(
        "", description="its name among the papers' costs; empty: not listed there"
    )
    model: Backbone | None = Field(None, description="null if it cannot be built here, see needs")
    method: Method = Field(Method(), description="router, experts and blocks; {} is dense")
    size: int = Field(224, ge=1, description="height and width of the images, pixels")
    classes: int = Field(1000, ge=2, description="outputs of the head")
    batch: int = Field(
        0, ge=0, description="images per training step, whose memory is counted; 0: not counted"
    )
    teacher_width: int = Field(
        0, ge=0, description="width of a teacher whose routers are counted too; 0: none"
    )
    needs: str = Field("", description="what is missing to build it")
    why: str = Field("", description="where moecore's model differs from the paper's")

    @model_validator(mode="after")
    def _built_or_why_not(self) -> Self:
        if (self.model is None) != bool(self.needs):
            raise ValueError(f"{self.name} has both of `model` and `needs`, or none; allowed: one")
        return self


class Sizes(Calculation):
    """Settings: which models are built."""

    metrics = METRICS
    page = OnPage("sizes of the papers' models", heading="Difference from the papers' numbers")

    models: tuple[PaperModel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [model.name for model in self.models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"models has {twice} twice; allowed: each name once")
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (keys, message) for models that cannot be built, and that no paper reports."""
        from moecore.report.tables.cells import REPORTED_COSTS

        for index, model in enumerate(self.models):
            if model.reported and model.reported not in REPORTED_COSTS:
                text = (
                    f"found {model.reported}; allowed: empty, or one of {', '.join(REPORTED_COSTS)}"
                )
                yield ("models", index, "reported"), text
            if model.model is not None and (refused := find_refusal(model.model_dump_json())):
                keys, text = refused
                inner = ("method",) if keys[:1] in (("router",), ("experts",), ("blocks",)) else ()
                yield ("models", index, *inner, *keys), text

    def calculate(self, out: Values) -> None:
        """Put parameters, FLOPs and memory of every model; UserError if its sizes do not fit.

        facts: models, the texts of each in the order of the settings.
        """
        for paper_model in self.models:
            for metric, number in count_sized_model(paper_model).items():
                out.put(metric, number, model=paper_model.name)
        texts = {"name", "reported", "needs", "why"}
        out.facts["models"] = [model.model_dump(include=texts) for model in self.models]


@cache
def find_refusal(settings: str) -> tuple[tuple[str, ...], str] | None:
    """Return (keys, message) if a model cannot be built, or None; settings: PaperModel as JSON."""
    from moecore.study.model_rules import BUILD_ERRORS, split_key_and_message

    try:
        build_on_meta(PaperModel.model_validate_json(settings))
    except BUILD_ERRORS as error:
        return split_key_and_message(error)
    return None


def count_sized_model(paper_model: PaperModel) -> dict[str, float]:
    """Return metric → value of one model; {} if it cannot be built here."""
    if paper_model.model is None:
        return {}
    model = build_on_meta(paper_model)
    counts: dict[str, float] = {**count_total_and_active_parameters(model)}
    layers = 0
    if model.moe is not None:
        layers = len(model.moe.indices(paper_model.model.depth))
        # A teacher routes in training only, so its routers are not among the active parameters.
        counts["parameters"] += paper_model.teacher_width * model.moe.experts.choices * layers
    pixels = torch.empty(1, model.image.channels, *model.image.shape, device="meta")
    flops = whole_and_routing_flops(model, pixels)
    counts["gflops"] = flops.total * 1e-9
    if layers:
        counts["routing_gflops"] = flops.routing / layers * 1e-9
    if paper_model.batch:
        batch = pixels.expand(paper_model.batch, *pixels.shape[1:])
        counts["training_memory_mb"] = training_step_memory(model, batch) * 1e-6
    return counts


def training_step_memory(model: BackboneModel, pixels: Tensor) -> int:
    """Return the peak bytes of a training step with AdamW, including weights and images.

    model, pixels (B, C, H, W): on the meta device. Measured at the second step, when moments exist;
    without regularizers, which the papers do not report.
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
        with LiveBytesCounter(live_training_tensors([model], optimizer, pixels)) as live:
            run_step()
    return live.peak


def build_on_meta(paper_model: PaperModel) -> BackboneModel:
    assert paper_model.model is not None
    image = ImageSpec(
        channels=3,
        size=paper_model.size,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        task=Classification(classes=tuple(map(str, range(paper_model.classes)))),
    )
    with torch.device("meta"):
        return paper_model.model.build(image, paper_model.method.moe)

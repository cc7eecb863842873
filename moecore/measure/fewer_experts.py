"""The score over the experts left: a trained model is pruned and merged, without any training.

E experts, N images.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import Estimate, MeasuredModel, Measurement, PartStore, load_or_compute
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches, text_block_scores
from moecore.statistics.crossed import encode_item_values
from moecore.tasks.base import Task
from moecore.training.surgery.expert_reduction import ExpertUse, measure_expert_use
from moecore.training.surgery.merge import Merge
from moecore.training.surgery.prune import Prune

Way = Literal["reap", "load", "merge"]
WayOrAll = Literal["all"] | Way
Share = Annotated[float, Field(gt=0, lt=1)]


class FewerExperts(Measurement):
    """How many experts are left, by which ways."""

    left: tuple[Share, ...] = Field(
        (0.75, 0.5, 0.25), min_length=1, description="Shares of a layer's experts, rounded up."
    )
    ways: tuple[Way, ...] = Field(
        ("reap", "load", "merge"),
        min_length=1,
        description="reap, load: pruned by that score; merge: clustered by mean outputs.",
    )
    calibration: int = Field(
        1000, ge=1, description="Training images that tell what experts do, evenly spread."
    )
    images: int | None = Field(
        None, ge=1, description="Test images that are scored, evenly spread; null: all of them."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: it needs experts."""
        return None if model.moe is not None else "the model has no experts"

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Return the scores of the model as it is, and of every way and share that can be."""
        model, data = subject.model, subject.data
        where = evenly_spaced_indices(len(data.test.labels), self.images)
        few = Split(data.test.images[where], data.test.labels[where], data.test.people_at(where))
        uses = measure_expert_use(model, data.train, self.calibration)
        rows, skipped = [], {}
        for way, left in self.planned_reductions():
            name = f"{way} {left:g}"
            compute = partial(score_reduced, model, uses, few, way, left)
            try:
                rows.append(load_or_compute(parts, name, ReducedScore, compute))
            except UserError as error:
                skipped[name] = str(error)
        return Result(task=data.task, images=len(where), rows=tuple(rows), skipped=skipped)

    def planned_reductions(self) -> list[tuple[WayOrAll, float]]:
        """Return all experts, then each way with each share, largest first."""
        ways = [(way, left) for way in self.ways for left in sorted(self.left, reverse=True)]
        return [("all", 1.0), *ways]


class ReducedScore(Config):
    """The score of a model with fewer experts."""

    way: WayOrAll  # all: as it was trained
    left: float  # share of the experts
    experts: int  # of a layer
    score: Estimate
    items: str | None  # one score an item, as ``encode_item_values`` packs them


class Result(Config):
    """A row for the model as it was trained, then way by way; most experts first."""

    task: Task
    images: int
    rows: tuple[ReducedScore, ...]
    skipped: dict[str, str] = {}  # way and share → why there is no such model


def score_reduced(
    model: Model, uses: Mapping[str, ExpertUse], split: Split, way: WayOrAll, left: float
) -> ReducedScore:
    """Return the score of a model with fewer experts on a split. Raises UserError where there is
    no such model.
    """
    if way != "all":
        reduction = Merge(left=left) if way == "merge" else Prune(left=left, by=way)
        model = reduction.reduce_experts(model, uses)
    task = model.image.task
    labels = torch.from_numpy(np.array(split.labels))
    if task.long:
        scores = text_block_scores(model, split.images, labels)
    else:
        prediction, _ = predict_in_batches(model, split.images, routing=False)
        scores = task.scores(prediction, model.targets(labels))
    return ReducedScore(
        way=way,
        left=left,
        experts=model.experts_and_router.experts.number,
        score=Estimate.of(task.interval(scores, split.people)),
        items=encode_item_values(scores.double().numpy(), split.people),
    )

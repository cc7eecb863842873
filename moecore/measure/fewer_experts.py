"""The score over the experts left: a trained model is pruned and merged, without any training.

E experts, N images.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import SCORE, Chart, Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches, text_block_scores
from moecore.training.surgery.expert_reduction import ExpertUse, measure_expert_use
from moecore.training.surgery.merge import Merge
from moecore.training.surgery.prune import Prune

Way = Literal["reap", "load", "merge"]
WayOrAll = Literal["all"] | Way
Share = Annotated[float, Field(gt=0, lt=1)]
TITLES = {"reap": "Pruned by REAP's score", "load": "Pruned by load", "merge": "Merged by outputs"}
METRICS = {
    "reduced_score": Metric(
        "{score}, {}{unit}",
        SCORE,
        SCORE,
        note="without training, on test images; what experts do is known from training images",
        over="reduction",
        name="{score}_{}",
        detail=True,
    ),
    "reduced_experts": Metric(""),  # of a layer
}


class FewerExperts(Measurement):
    """How many experts are left, by which ways."""

    metrics = METRICS
    page = OnPage(
        "fewer experts",
        place=13,
        heading="Fewer experts",
        charts=tuple(
            Chart(
                *("reduced_score", way, title, "Experts gone, %", "{score}{unit}"),
                words="Without training.",
                share=None,
                top=1.02,
            )
            for way, title in TITLES.items()
        ),
    )

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

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return the words of a ``reduction_key``."""
        way, _, percent = str(place).partition("_")
        return f"{TITLES[way].lower()}, {percent.replace('_', '.')} % left"

    def places(self) -> dict[str, Iterable[Place]]:
        """Return each way with each share of experts left."""
        return {"reduction": [reduction_key(*one) for one in self.planned_reductions()[1:]]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put the scores of the model as it is, and of every way and share that can be."""
        model, data = subject.model, subject.data
        where = evenly_spaced_indices(len(data.test.labels), self.images)
        few = Split(data.test.images[where], data.test.labels[where], data.test.people_at(where))
        out.people = few.people
        uses = measure_expert_use(model, data.train, self.calibration)
        skipped: dict[str, list[str]] = {}
        for way, left in self.planned_reductions():
            name = f"{way} {left:g}"
            try:
                out.piece(name, partial(put_reduced, model, uses, few, way, left))
            except UserError as error:
                skipped.setdefault(str(error), []).append(name)
        out.skipped += [f"{', '.join(names)}: {why}" for why, names in skipped.items()]
        self.put_curves(out)

    def put_curves(self, out: Values) -> None:
        """Put the scores of each way again, over the percent of experts that are gone, from 0."""
        result = out.found()
        whole = result.find("reduced_score", way="all", left=1.0)
        for way in self.ways:
            reduced = [
                (left, result.find("reduced_score", way=way, left=left))
                for left in sorted(self.left, reverse=True)
            ]
            if any(value for _, value in reduced):
                for left, value in [(1.0, whole), *reduced]:
                    score = None if value is None else value.value
                    out.put("reduced_score", score, **{way: 100 * (1 - left)})

    def planned_reductions(self) -> list[tuple[WayOrAll, float]]:
        """Return all experts, then each way with each share, largest first."""
        ways = [(way, left) for way in self.ways for left in sorted(self.left, reverse=True)]
        return [("all", 1.0), *ways]


def reduction_key(way: str, left: float) -> str:
    """Return reap_50 of the way and the percent of the experts that are left."""
    return f"{way}_{100 * left:.3g}".replace(".", "_")


def put_reduced(
    model: Model,
    uses: Mapping[str, ExpertUse],
    split: Split,
    way: WayOrAll,
    left: float,
    out: Values,
) -> None:
    """Put the score of a model with fewer experts on a split. Raises UserError where there is no
    such model.
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
    interval = task.interval(scores, split.people)
    out.put("reduced_score", interval, way=way, left=left)
    out.put("reduced_experts", model.experts_and_router.experts.number, way=way, left=left)
    if way != "all":
        out.put("reduced_score", scores, interval, reduction=reduction_key(way, left))

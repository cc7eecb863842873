"""Score of a trained model with fewer experts, pruned or merged without training."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.values import SCORE, Chart, Metric, OnPage, Place, Values
from moecore.nn.predict import predict_in_batches, score_last_blocks
from moecore.training.surgery.expert_reduction import measure_expert_use
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
        note="without training, on test images; statistics of experts are from training images",
        over="reduction",
        name="{score}_{}",
        detail=True,
    ),
    "reduced_experts": Metric(""),  # per layer
}


class FewerExperts(Measurement):
    """Score of the model with a share of its experts left, by pruning and by merging."""

    no_dense = "the model has no experts"
    metrics = METRICS
    page = OnPage(
        "fewer experts",
        place=13,
        heading="Fewer experts",
        charts=tuple(
            Chart(
                "reduced_score",
                way,
                title=title,
                x="Experts removed, %",
                y="{score}{unit}",
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
    calibration: int = Field(1000, ge=1, description="Evenly spread training images for scores.")
    images: int | None = Field(None, ge=1, description="Test images, evenly spread; null: all.")

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return a ``reduction_key`` in words: load_50 → "pruned by load, 50 % left"."""
        way, _, percent = str(place).partition("_")
        return f"{TITLES[way].lower()}, {percent.replace('_', '.')} % left"

    def places(self) -> dict[str, Iterable[Place]]:
        reductions = self.planned_reductions()[1:]
        return {"reduction": [reduction_key(way, share) for way, share in reductions]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        model = subject.model
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        few = Split(test.images[indices], test.labels[indices], test.people_at(indices))
        out.people = few.people
        uses = measure_expert_use(model, subject.data.train, self.calibration)

        def put_reduced(way: WayOrAll, share: float, out: Values) -> None:
            reduced = model
            if way != "all":
                reduction = Merge(left=share) if way == "merge" else Prune(left=share, by=way)
                reduced = reduction.reduce_experts(model, uses)
            task = model.image.task
            labels = torch.from_numpy(np.array(few.labels))
            if task.long:
                scores = score_last_blocks(reduced, few.images, labels)
            else:
                prediction, _ = predict_in_batches(reduced, few.images, routing=False)
                scores = task.scores(prediction, model.targets(labels))
            interval = task.interval(scores, few.people)
            out.put("reduced_score", interval, way=way, left=share)
            experts = reduced.experts_and_router.experts.number
            out.put("reduced_experts", experts, way=way, left=share)
            if way != "all":
                out.put("reduced_score", scores, interval, reduction=reduction_key(way, share))

        skipped: dict[str, list[str]] = {}
        for way, share in self.planned_reductions():
            name = f"{way} {share:g}"
            try:
                out.piece(name, partial(put_reduced, way, share))
            except UserError as error:
                skipped.setdefault(str(error), []).append(name)
        out.skipped += [f"{', '.join(names)}: {reason}" for reason, names in skipped.items()]
        # The scores of each way again, over the percentage of removed experts, from 0.
        result = out.found()
        shares = sorted(self.left, reverse=True)
        full = result.interval("reduced_score", way="all", left=1.0)
        for way in self.ways:
            reduced = [result.interval("reduced_score", way=way, left=share) for share in shares]
            if any(reduced):
                for share, score in zip([1.0, *shares], [full, *reduced], strict=True):
                    value = None if score is None else score.value
                    out.put("reduced_score", value, **{way: 100 * (1 - share)})

    def planned_reductions(self) -> list[tuple[WayOrAll, float]]:
        """Return (way, remaining share of experts) per model; first ("all", 1.0), unreduced."""
        ways = [(way, share) for way in self.ways for share in sorted(self.left, reverse=True)]
        return [("all", 1.0), *ways]


def reduction_key(way: str, share: float) -> str:
    """Return a name of the way and the remaining percentage, such as reap_50."""
    return f"{way}_{100 * share:.3g}".replace(".", "_")

"""Does the routing stay when the image is moved a little? MoGE's table 1 and figure 2."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.invariance_transforms import TRANSFORMS, draw_affines, transform_images
from moecore.measure.base import SEED, MeasuredModel, Measurement, no_changed_images_reason
from moecore.measure.routing_metrics.imed import class_expert_probs, imed_between, imed_by_image
from moecore.measure.routing_metrics.layer_metrics import expert_agreement
from moecore.measure.values import Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_interval

METRICS = {
    "imed": Metric(
        "IMED, {}",
        "lower",
        note="image Euclidean distance of the routers' outputs, plain and transformed",
        paper="moge",
        over="transform",
        mean="IMED, mean",
    ),
    "imed_normalised": Metric(
        "IMED, normalised, {}",
        "lower",
        note="IMED under a transform / mean IMED between different images; flat routing has no "
        "gain",
        paper="moge",
        over="transform",
        mean="IMED, normalised",
        detail=True,
    ),
    "agreement_transformed": Metric(
        "Agreement, {}",
        "higher",
        "share",
        note="tokens whose first expert is the same in the image and its transformed version",
        paper="moge",
        over="transform",
        mean="Agreement, transformed",
        detail=True,
    ),
}


class Invariance(Measurement):
    """Which test images are moved, and how the movements are drawn."""

    flat_classes = True
    metrics = METRICS
    page = OnPage("invariance", place=6)

    images: int | None = Field(
        2000, ge=1, description="Test images, evenly spread over the split; null takes all."
    )
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: it needs a routing that could move."""
        return "a dense model has no routing that could move" if model.moe is None else None

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Return why not, in words: it needs flat images with classes, too."""
        reason = cls.model_refusal(subject.model)
        return reason or no_changed_images_reason(subject, "class_maps")

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the transforms."""
        return {"transform": TRANSFORMS}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put IMED of every image and its moved self under each transform, and the class maps.

        facts: classes; class_maps, [class][layer][expert], the mean probability, None for a class
        without images.
        """
        test = subject.data.test
        task = subject.data.task
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        _, clean = predict_in_batches(subject.model, images, self.batch)
        between = imed_between(probs_by_layer(clean), SEED) if len(images) > 1 else None
        for name in TRANSFORMS:
            affines = draw_affines(name, len(images), images.shape[-2:], SEED)
            compute = partial(
                put_moved, subject.model, images, clean, affines, self.batch, between, name
            )
            out.piece(name, compute)
        marked = task.by_class(torch.from_numpy(test.labels[where]))
        if marked is None:
            raise ValueError("labels are not classes; ask `applies` first")
        rows, classes = marked
        # images stand once for each of their classes
        chosen = tuple(record.map_tensors(lambda field: field[rows]) for record in clean)
        out.facts["classes"] = task.classes
        out.facts["class_maps"] = class_expert_probs(chosen, classes, len(task.classes))


def put_moved(
    model: Model,
    images: np.ndarray,
    clean: tuple[RoutingRecord, ...],
    affines: Tensor,
    batch: int,
    between: Tensor | None,
    name: str,
    out: Values,
) -> None:
    """Put how far the routing of images under ``affines``, the transform ``name``, lies from
    ``clean``.

    between: (N,), each image's distance from another one; None where there is no other.
    """
    _, records = predict_in_batches(model, move_images(images, affines, batch), batch)
    lengths = imed_by_image(probs_by_layer(clean), probs_by_layer(records)).numpy()
    out.put("imed", lengths, transform=name)
    share = None if between is None else imed_over_between_images(lengths, between.numpy())
    out.put("imed_normalised", share, transform=name)
    same = [float(layer.mean()) for layer in expert_agreement(clean, records)]
    out.put("agreement_transformed", sum(same) / len(same), transform=name)


def imed_over_between_images(lengths: np.ndarray, between: np.ndarray) -> Interval | None:
    """Mean IMED under a transform over the mean IMED between different images, both (N,).

    0: nothing moved; 1: a moved image is routed as another image would be. Flat probs make both
    small, so that the ratio tells steady routing from routing that prefers no expert, which IMED
    alone does not. With its bootstrap interval over images, of which each brings its own two
    distances. None where all images are routed alike.
    """
    if not between.any():
        return None

    def ratio(chosen: np.ndarray) -> float:
        return float(lengths[chosen].mean() / max(between[chosen].mean(), np.finfo(float).tiny))

    return bootstrap_interval(ratio, len(lengths), lowest=0.0)


def move_images(images: np.ndarray, affines: Tensor, batch: int) -> Tensor:
    """Images uint8 (N, C, H, W) under affines (N, 3, 3); on the CPU, alike on every device."""
    chunks = (slice(start, start + batch) for start in range(0, len(images), batch))
    return torch.cat(
        [transform_images(torch.from_numpy(images[chunk]), affines[chunk]) for chunk in chunks]
    )


def probs_by_layer(records: tuple[RoutingRecord, ...]) -> tuple[Tensor, ...]:
    return tuple(layer.probs for layer in records)

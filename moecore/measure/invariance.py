"""Invariance of the routing to small transforms of the image (MoGE, table 1 and figure 2)."""

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
from moecore.measure.routing_metrics.layer_metrics import (
    class_expert_probs,
    expert_agreement,
    imed_between,
    imed_by_image,
)
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
        note="IMED under a transform / mean IMED between different images; it does not reward "
        "uniform routing",
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
    """Distance and agreement of routing between images and their transformed versions."""

    flat_classes = True
    metrics = METRICS
    page = OnPage("invariance", place=6)

    images: int | None = Field(
        2000, ge=1, description="Test images, evenly spread over the split; null takes all."
    )
    batch: int = Field(
        256, ge=1, description="Images per forward pass; results do not depend on it."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return the reason for a dense model."""
        return "a dense model has no routing that could move" if model.moe is None else None

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Return the reason for a dense model, and for data other than flat images with classes."""
        reason = cls.model_refusal(subject.model)
        return reason or no_changed_images_reason(subject, "class_maps")

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the transforms."""
        return {"transform": TRANSFORMS}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put IMED and agreement of every image under each transform, and the class maps.

        facts: classes; class_maps, [class][layer][expert], the mean probability, None for a class
        without images.
        """
        test = subject.data.test
        task = subject.data.task
        indices = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        _, clean = predict_in_batches(subject.model, images, self.batch)
        between = imed_between(probs_by_layer(clean), SEED) if len(images) > 1 else None
        for name in TRANSFORMS:
            affines = draw_affines(name, len(images), images.shape[-2:], SEED)
            compute = partial(
                put_moved, subject.model, images, clean, affines, self.batch, between, name
            )
            out.piece(name, compute)
        members = task.by_class(torch.from_numpy(test.labels[indices]))
        if members is None:
            raise ValueError("labels are not classes; call `applies` first")
        rows, classes = members
        # An image of several classes counts for each of them.
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
    """Put the distance of the routing under ``affines``, the transform ``name``, from ``clean``.

    between: (N,), each image's distance to another image; None for a single image.
    """
    _, records = predict_in_batches(model, move_images(images, affines, batch), batch)
    lengths = imed_by_image(probs_by_layer(clean), probs_by_layer(records)).numpy()
    out.put("imed", lengths, transform=name)
    share = None if between is None else imed_over_between_images(lengths, between.numpy())
    out.put("imed_normalised", share, transform=name)
    same = [float(layer.mean()) for layer in expert_agreement(clean, records)]
    out.put("agreement_transformed", sum(same) / len(same), transform=name)


def imed_over_between_images(lengths: np.ndarray, between: np.ndarray) -> Interval | None:
    """Return mean IMED under a transform / mean IMED between images, both (N,), with interval.

    0: unchanged; 1: routed like another image. Near-uniform probabilities make both small, so the
    ratio, unlike IMED, distinguishes invariant routing from uniform routing. None if all images
    have the same routing.
    """
    if not between.any():
        return None

    def ratio(resample: np.ndarray) -> float:
        reference = max(between[resample].mean(), np.finfo(float).tiny)
        return float(lengths[resample].mean() / reference)

    return bootstrap_interval(ratio, len(lengths), lowest=0.0)


def move_images(images: np.ndarray, affines: Tensor, batch: int) -> Tensor:
    """Transform images uint8 (N, C, H, W) by affines (N, 3, 3), always on the CPU."""
    chunks = (slice(start, start + batch) for start in range(0, len(images), batch))
    return torch.cat(
        [transform_images(torch.from_numpy(images[chunk]), affines[chunk]) for chunk in chunks]
    )


def probs_by_layer(records: tuple[RoutingRecord, ...]) -> tuple[Tensor, ...]:
    return tuple(layer.probs for layer in records)

"""Does the routing stay when the image is moved a little? MoGE's table 1 and figure 2."""

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.invariance_transforms import TRANSFORMS, draw_affines, transform_images
from moecore.measure.base import (
    SEED,
    MeasuredModel,
    Measurement,
    Number,
    PartStore,
    load_or_compute,
    no_changed_images_reason,
)
from moecore.measure.routing_metrics.imed import class_expert_probs, imed_between, imed_by_image
from moecore.measure.routing_metrics.layer_metrics import expert_agreement
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import Interval, bootstrap_interval, bootstrap_mean


class Invariance(Measurement):
    """Which test images are moved, and how the movements are drawn."""

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

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """IMED of every image and its moved self under each transform, and the classes' maps."""
        test = subject.data.test
        task = subject.data.task
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        _, clean = predict_in_batches(subject.model, images, self.batch)
        affines = {
            name: draw_affines(name, len(images), images.shape[-2:], SEED) for name in TRANSFORMS
        }
        probs = probs_by_layer(clean)
        between = imed_between(probs, SEED) if len(images) > 1 else None
        moves = imed_rows_by_transform(
            subject.model, images, clean, affines, self.batch, parts, between
        )
        marked = task.by_class(torch.from_numpy(test.labels[where]))
        if marked is None:
            raise ValueError("labels are not classes; ask `applies` first")
        rows, classes = marked
        # images stand once for each of their classes
        chosen = tuple(record.map_tensors(lambda field: field[rows]) for record in clean)
        return Result(
            images=len(images),
            transforms=moves,
            classes=task.classes,
            class_maps=class_expert_probs(chosen, classes, len(task.classes)).tolist(),
        )


class MovedRow(Config):
    """How far a moved image's routing lies from the image's: IMED with 95 % limits."""

    name: str  # "rotation 5"
    d: float
    d_low: float | None
    d_high: float | None
    normalised: float | None
    """d over the mean IMED between different images; None where that is 0 or there is one image."""
    normalised_low: float | None
    normalised_high: float | None
    agreement: float  # share of tokens with the same most probable expert; mean over layers
    items: str | None = None  # d of each image, as ``encode_item_values`` packs them


class Result(Config):
    """One row a transform, and the classes' maps."""

    images: int
    transforms: tuple[MovedRow, ...]
    classes: tuple[str, ...]
    class_maps: tuple[tuple[tuple[Number, ...], ...], ...]
    """[class][layer][expert]: mean probability; None for a class without images."""


def imed_rows_by_transform(
    model: Model,
    images: np.ndarray,
    clean: tuple[RoutingRecord, ...],
    affines: Mapping[str, Tensor],
    batch: int,
    parts: PartStore,
    between: Tensor | None = None,
) -> tuple[MovedRow, ...]:
    """One row a transform: the mean distance of the routing from ``clean``.

    between: (N,), each image's distance from another one; None where there is no other.
    """

    def row(name: str) -> MovedRow:
        _, records = predict_in_batches(model, move_images(images, affines[name], batch), batch)
        lengths = imed_by_image(probs_by_layer(clean), probs_by_layer(records)).numpy()
        d = bootstrap_mean(lengths)
        share = None if between is None else imed_over_between_images(lengths, between.numpy())
        same = [float(layer.mean()) for layer in expert_agreement(clean, records)]
        return MovedRow(
            name=name,
            d=d.value,
            d_low=d.low,
            d_high=d.high,
            normalised=share.value if share else None,
            normalised_low=share.low if share else None,
            normalised_high=share.high if share else None,
            agreement=sum(same) / len(same),
            items=encode_item_values(lengths),
        )

    return tuple(
        load_or_compute(parts, name, MovedRow, lambda name=name: row(name)) for name in affines
    )


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

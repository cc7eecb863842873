"""Invariance of the routing to small transforms of the image (MoGE, table 1 and figure 2).

The twelve transforms, small rotations, scalings, translations and shears, follow torchvision's
RandomAffine, which the paper names: rotation, translation and shear are uniform between −limit and
+limit, about the centre; the shear moves columns; translations are rounded to whole pixels; outside
is black. Two choices are ours: a scaling by s is exactly s (the paper gives one number where
RandomAffine takes a range), and pixels are interpolated (torchvision's default takes the nearest).
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core import routing_records, streams
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views import warping
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics import layer_metrics
from moecore.measure.values import Metric, OnPage, Place, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_statistic

METRICS = {
    "imed": Metric(
        "IMED, {}",
        "lower",
        note="image Euclidean distance of the routers' outputs, plain and transformed",
        mean="IMED, mean",
    ),
    "imed_normalised": Metric(
        "IMED, normalised, {}",
        "lower",
        note="IMED under a transform / mean IMED between different images; it does not reward "
        "uniform routing",
        mean="IMED, normalised",
        detail=True,
    ),
    "agreement_transformed": Metric(
        "Agreement, {}",
        "higher",
        "share",
        note="tokens whose first expert is the same in the image and its transformed version",
        mean="Agreement, transformed",
        detail=True,
    ),
}
METRICS = {key: metric._replace(paper="moge", over="transform") for key, metric in METRICS.items()}


class Invariance(Measurement):
    """Distance and agreement of routing between images and their transformed versions."""

    no_dense = "a dense model has no routing that could move"
    flat_classes = True
    classes_for = "class_maps"
    changes_images = True
    metrics = METRICS
    page = OnPage("invariance", place=6)

    images: int | None = Field(2000, ge=1, description="Test images, evenly spread; null: all.")
    batch: int = Field(256, ge=1, description="Images per pass; results do not depend on it.")

    def places(self) -> dict[str, Iterable[Place]]:
        return {"transform": TRANSFORMS}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: classes; class_maps, [class][layer][expert], the mean probability, None for a class
        # without images.
        test = subject.data.test
        task = subject.data.task
        indices = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        _, clean = predict_in_batches(subject.model, images, self.batch)
        between = None  # (N,), each image's distance to another image
        if len(images) > 1:
            between = layer_metrics.imed_to_others(get_probs_of_records(clean), SEED).numpy()

        def put_transformed(name: str, out: Values) -> None:
            affines = draw_affines(name, len(images), images.shape[-2:], SEED)
            moved = transform_images(images, affines, self.batch)
            _, records = predict_in_batches(subject.model, moved, self.batch)
            before, after = get_probs_of_records(clean), get_probs_of_records(records)
            lengths = layer_metrics.imed_by_image(before, after).numpy()
            out.put("imed", lengths, transform=name)
            if between is not None:
                out.put("imed_normalised", bootstrap_imed_ratio(lengths, between), transform=name)
            same = [float(layer.mean()) for layer in layer_metrics.expert_agreement(clean, records)]
            out.put("agreement_transformed", sum(same) / len(same), transform=name)

        for name in TRANSFORMS:
            out.piece(name, partial(put_transformed, name))
        members = task.by_class(torch.from_numpy(test.labels[indices]))
        if members is None:
            raise ValueError("labels are not classes; call `applies` first")
        rows, classes = members
        # An image of several classes counts for each of them.
        chosen = tuple(record.map_tensors(lambda field: field[rows]) for record in clean)
        out.facts["classes"] = task.classes
        maps = layer_metrics.class_expert_probs(chosen, classes, len(task.classes))
        out.facts["class_maps"] = maps


def bootstrap_imed_ratio(lengths: np.ndarray, between: np.ndarray) -> Interval | None:
    """Return mean IMED under a transform / mean IMED between images (None if 0), both (N,)."""
    # 0: unchanged; 1: routed like another image. Near-uniform probabilities make both small, so the
    # ratio, unlike IMED, distinguishes invariant routing from uniform routing.
    if not between.any():
        return None

    def ratio(resample: np.ndarray) -> float:
        reference = max(between[resample].mean(), np.finfo(float).tiny)
        return float(lengths[resample].mean() / reference)

    return bootstrap_statistic(ratio, len(lengths), lowest=0.0)


def transform_images(images: np.ndarray, affines: Tensor, batch: int) -> Tensor:
    """Warp images uint8 (N, C, H, W) by affines (N, 3, 3) on the CPU; outside is black."""
    size = images.shape[-2:]
    moved = []
    for start in range(0, len(images), batch):
        chunk = slice(start, start + batch)
        warped = warping.warp_images(torch.from_numpy(images[chunk]), affines[chunk], size, "zeros")
        moved.append(warped.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(moved)


def get_probs_of_records(records: tuple[routing_records.RoutingRecord, ...]) -> tuple[Tensor, ...]:
    return tuple(layer.probs for layer in records)


class Transform(NamedTuple):
    """Limits of the random affines of one transform; the default is the identity."""

    degrees: float = 0.0  # rotation from −degrees to +degrees
    translate: tuple[float, float] = (0.0, 0.0)  # horizontal, vertical, at most; of the side
    scale: float = 1.0  # exactly
    shear: float = 0.0  # from −shear to +shear degrees


TRANSFORMS = {  # names as in the table; translations are (horizontal, vertical)
    "rotation 5": Transform(degrees=5),
    "rotation 10": Transform(degrees=10),
    "rotation 15": Transform(degrees=15),
    "scaling 0.5": Transform(scale=0.5),
    "scaling 0.8": Transform(scale=0.8),
    "scaling 1.1": Transform(scale=1.1),
    "translation (0, 0.1)": Transform(translate=(0, 0.1)),
    "translation (0.1, 0)": Transform(translate=(0.1, 0)),
    "translation (0.1, 0.1)": Transform(translate=(0.1, 0.1)),
    "shear 5": Transform(shear=5),
    "shear 10": Transform(shear=10),
    "shear 15": Transform(shear=15),
}


def draw_affines(name: str, count: int, size: tuple[int, int], seed: int) -> Tensor:
    """Return affines (count, 3, 3) of TRANSFORMS[name] drawn by the seed; size: (height, width)."""
    settings = TRANSFORMS[name]
    generator = streams.generator_for(seed, *name.encode())

    def within(limit: float) -> Tensor:
        return warping.uniform_draws(streams.BatchDraws(generator, count), -limit, limit)

    turn = within(settings.degrees).deg2rad()
    shear = within(settings.shear).deg2rad().tan()
    axes = zip(settings.translate, size[::-1], strict=True)
    right, down = (within(share * side).round() for share, side in axes)
    scaling = warping.scaling_affines(settings.scale, settings.scale, count)
    linear = warping.rotation_affines(turn) @ scaling @ warping.shearing_affines(0, shear, count)
    return warping.recentre_affines(warping.translation_affines(down, right, count) @ linear, *size)

"""The error under each of fifteen corruptions at each severity (Hendrycks & Dietterich, 2019)."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.corruptions import CORRUPTIONS, corrupt_images
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import (
    SEED,
    MeasuredModel,
    Measurement,
    PartStore,
    no_changed_images_reason,
)
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_mean
from moecore.tasks.base import Task

Severity = Annotated[int, Field(ge=1, le=5)]
Errors = Mapping[str, Mapping[int, float]]  # corruption → severity → error in [0, 1]
Name = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]


class Corruptions(Measurement):
    """Which images are corrupted, how, and how strongly."""

    images: int | None = Field(
        300, ge=1, description="Test images, evenly spread, the same for every method; null: all."
    )
    severities: tuple[Severity, ...] = Field(
        (1, 3, 5), min_length=1, description="1 to 5; a corruption's error is the mean over them."
    )
    names: tuple[Name, ...] | None = Field(
        None, min_length=1, description="Which of the fifteen; null takes all."
    )

    @field_validator("severities", "names")
    @classmethod
    def _once(cls, listed: tuple | None) -> tuple | None:
        if listed and len(set(listed)) < len(listed):
            raise ValueError("the same value is listed twice")
        return listed

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs flat images that a model gets right or wrong."""
        return no_changed_images_reason(subject, "share")

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """The errors under each corruption."""
        test = subject.data.test
        task = subject.data.task
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        labels = subject.model.targets(torch.from_numpy(test.labels[where]))

        def hits_on(pixels: np.ndarray) -> Tensor:
            prediction, _ = predict_in_batches(subject.model, pixels, routing=False)
            return task.scores(prediction, labels)

        rows, wrong = corruption_rows(hits_on, images, where, task, self, parts)
        # all corruptions have as many severities
        severities = len(self.severities)
        errors = [row.error for row in rows]
        means = [np.mean(errors[at : at + severities]) for at in range(0, len(rows), severities)]
        mean = bootstrap_mean(wrong)
        return Result(
            images=len(labels),
            mean_error=float(np.mean(means)),
            mean_low=mean.low,
            mean_high=mean.high,
            corruptions=rows,
        )


class CorruptionRow(Config):
    """The error under one corruption at one severity."""

    name: str
    severity: int
    error: float


class Result(Config):
    """Shares of images that the model gets wrong."""

    images: int
    mean_error: float  # over the corruptions
    mean_low: float | None  # over the images: one picture's corruptions belong together
    mean_high: float | None
    corruptions: tuple[CorruptionRow, ...]


def corruption_rows(
    hits_on: Callable[[np.ndarray], Tensor],
    images: np.ndarray,
    where: np.ndarray,
    task: Task,
    settings: Corruptions,
    parts: PartStore,
) -> tuple[tuple[CorruptionRow, ...], np.ndarray]:
    """One row a corruption and severity, and each image's share of errors over all of them, (N,).

    hits_on: images (N, C, H, W) to bool (N,), which are right; where: the images' places in the
    split, which their draws depend on.
    """
    rows = []
    wrong = []
    for name in settings.names or CORRUPTIONS:
        for severity in sorted(settings.severities):

            def packed_hits(name: str = name, severity: int = severity) -> str | list[float]:
                return task.encode_scores(
                    hits_on(corrupt_images(images, name, severity, SEED, where))
                )

            hits = task.decode_scores(parts(f"{name} {severity}", packed_hits), len(images))
            error = int((~hits).sum()) / len(hits)
            rows.append(CorruptionRow(name=name, severity=severity, error=error))
            wrong.append(~hits.numpy())
    return tuple(rows), np.mean(wrong, axis=0)


def mean_corruption_error(errors: Errors, baseline: Errors) -> float:
    """Return mCE: mean over corruptions of Σ_s error / Σ_s baseline error.

    1 where both are alike, below 1 where the model is better.  Raises UserError where the two were
    not measured under the same corruptions and severities, or where the baseline makes no error at
    all under a corruption, whose share is then not defined.
    """
    ours = {name: set(row) for name, row in errors.items()}
    theirs = {name: set(row) for name, row in baseline.items()}
    if ours != theirs or not errors:
        needed = "need the same corruptions and severities, at least one"
        raise UserError(f"mean corruption error: the model and the baseline {needed}")
    ratios = []
    for name, row in errors.items():
        below = math.fsum(baseline[name].values())
        if not below:
            none = f"the baseline makes no error under {name}"
            raise UserError(f"mean corruption error: {none}, so no ratio is defined")
        ratios.append(math.fsum(row.values()) / below)
    return sum(ratios) / len(ratios)

"""Error under each of fifteen corruptions at each severity (Hendrycks & Dietterich, 2019)."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.core.files import UserError
from moecore.data import corruptions, prepared
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.values import Chart, Found, Metric, OnPage, Place, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_mean

Severity = Annotated[int, Field(ge=1, le=5)]
Errors = Mapping[Place, Mapping[Place, float]]  # corruption → severity → error in [0, 1]
Noise = Literal["gaussian_noise", "shot_noise", "impulse_noise"]
Blur = Literal["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
Weather = Literal["snow", "frost", "fog", "brightness"]
Digital = Literal["contrast", "elastic_transform", "pixelate", "jpeg_compression"]
Name = Literal[Noise, Blur, Weather, Digital]


def relative_mce(result: Found, dense: Sequence[Found]) -> float | None:
    """Return the mCE relative to ``dense`` results; None if these have error 0 for a corruption."""
    baseline = mean_dense_errors(dense)
    if baseline is None:
        return None
    return mean_corruption_error(errors_of(result), baseline)


def mean_dense_errors(dense: Sequence[Found]) -> Errors | None:
    """Return mean errors over dense models; None if a corruption has error 0 at all severities."""
    seeds = [errors_of(result) for result in dense]
    errors = {
        name: {severity: fmean(seed[name][severity] for seed in seeds) for severity in row}
        for name, row in seeds[0].items()
    }
    if all(any(row.values()) for row in errors.values()):
        return errors
    return None


METRICS = {
    "corruption_error": Metric(
        "Error, mean", "lower", "share", note="over corruptions and severities", paper="corruptions"
    ),
    "mce": Metric(
        "mCE",
        "lower",
        note="mean over corruptions of error / error of dense, each summed over severities; 1: "
        "equal to dense",
        paper="corruptions",
        of_dense=relative_mce,
    ),
    "error": Metric(
        "Error, {}",
        "lower",
        "share",
        note="mean over severities",
        paper="corruptions",
        over="corruption",
        detail=True,
    ),
}


class Corruptions(Measurement):
    """Error of a model on corrupted test images."""

    flat_classes = True
    classes_for = "share"
    changes_images = True
    metrics = METRICS
    page = OnPage(
        "corruptions",
        place=7,
        heading="Common corruptions",
        charts=(
            Chart(
                "error",
                "severity",
                title="Error under corruption",
                x="Severity",
                y="Error",
                words="Mean over corruptions.",
                share=True,
                height=3.2,
            ),
        ),
    )

    images: int | None = Field(
        300, ge=1, description="Test images, evenly spread, the same for every method; null: all."
    )
    severities: tuple[Severity, ...] = Field(
        (1, 3, 5), min_length=1, description="1 to 5; a corruption's error is the mean over them."
    )
    names: tuple[Name, ...] | None = Field(None, min_length=1, description="Null: all fifteen.")

    @field_validator("severities", "names")
    @classmethod
    def _once(cls, values: tuple | None) -> tuple | None:
        if values and len(set(values)) < len(values):
            raise ValueError("the same value is listed twice")
        return values

    @classmethod
    def place_words(cls, place: Place) -> str:
        return super().place_words(place).replace("_", " ")

    def places(self) -> dict[str, Iterable[Place]]:
        return {"corruption": self.names or get_args(Name)}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        test = subject.data.test
        indices = prepared.evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        labels = subject.model.targets(torch.from_numpy(test.labels[indices]))

        def hits_on(pixels: np.ndarray) -> Tensor:
            prediction, _ = predict_in_batches(subject.model, pixels, routing=False)
            return out.task.scores(prediction, labels)

        # The interval of the mean over all is over images, as an image's corruptions are dependent.
        wrong = put_corruption_errors(hits_on, images, indices, self, out)
        errors = errors_of(out.found())
        for name, row in errors.items():
            out.put("error", sum(row.values()) / len(row), corruption=name)
        for severity in sorted(self.severities):
            mean = sum(row[severity] for row in errors.values()) / len(errors)
            out.put("error", mean, severity=severity)
        mean = float(np.mean([np.mean([*row.values()]) for row in errors.values()]))
        out.put("corruption_error", bootstrap_mean(wrong)._replace(value=mean))


def errors_of(result: Found) -> Errors:
    """Collect the errors of a result as corruption → severity → error."""
    errors: dict[Place, dict[Place, float]] = defaultdict(dict)
    for value in result.all("error"):
        if {"corruption", "severity"} <= set(value.at):
            errors[value.at["corruption"]][value.at["severity"]] = value.value
    return errors


def put_corruption_errors(
    hits_on: Callable[[np.ndarray], Tensor],  # images (N, C, H, W) → bool (N,)
    images: np.ndarray,
    indices: np.ndarray,  # in the split; the corruptions' random draws depend on them
    settings: Corruptions,
    out: Values,
) -> np.ndarray:
    """Put ``error`` per corruption and severity; return each image's share of errors, (N,)."""

    def compute_hits(name: str, severity: int) -> str | list[float]:
        pixels = corruptions.corrupt_images(images, name, severity, SEED, indices)
        return out.task.encode_scores(hits_on(pixels))

    wrong = []
    for name in settings.names or corruptions.CORRUPTIONS:
        for severity in sorted(settings.severities):
            packed = out.parts(f"{name} {severity}", partial(compute_hits, name, severity))
            hits = out.task.decode_scores(packed, len(images))
            error = int((~hits).sum()) / len(hits)
            out.put("error", error, corruption=name, severity=severity)
            wrong.append(~hits.numpy())
    return np.mean(wrong, axis=0)


def mean_corruption_error(errors: Errors, baseline: Errors) -> float:
    """Return mCE: mean over corruptions of Σ_s error / Σ_s baseline error, s the severities."""
    severities = {name: set(row) for name, row in errors.items()}
    baseline_severities = {name: set(row) for name, row in baseline.items()}
    if severities != baseline_severities or not errors:
        raise UserError(
            "mean corruption error: the model and the baseline need the same corruptions and "
            "severities, at least one"
        )
    ratios = []
    for name, row in errors.items():
        baseline_error = math.fsum(baseline[name].values())
        if not baseline_error:
            raise UserError(
                f"mean corruption error: the baseline makes no error under {name}, so no ratio is "
                "defined"
            )
        ratios.append(math.fsum(row.values()) / baseline_error)
    return sum(ratios) / len(ratios)

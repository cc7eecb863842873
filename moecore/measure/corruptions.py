"""The error under each of fifteen corruptions at each severity (Hendrycks & Dietterich, 2019)."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.core.files import UserError
from moecore.data.corruptions import CORRUPTIONS, corrupt_images
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, no_changed_images_reason
from moecore.measure.values import Chart, Found, Metric, OnPage, Place, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_mean

Severity = Annotated[int, Field(ge=1, le=5)]
Errors = Mapping[Place, Mapping[Place, float]]  # corruption → severity → error in [0, 1]
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


def relative_error(result: Found, dense: Sequence[Found]) -> float | None:
    """Return mCE; None where the dense model makes no error under a corruption: it has no ratio."""
    baseline = errors_of_dense(dense)
    return None if baseline is None else mean_corruption_error(errors_of(result), baseline)


def errors_of_dense(dense: Sequence[Found]) -> Errors | None:
    """Return the mean errors of all dense models; None where one is 0 at all severities."""
    seeds = [errors_of(one) for one in dense]
    errors = {
        name: {severity: fmean(one[name][severity] for one in seeds) for severity in row}
        for name, row in seeds[0].items()
    }
    return errors if all(any(row.values()) for row in errors.values()) else None


METRICS = {
    "corruption_error": Metric(
        "Error, mean",
        "lower",
        "share",
        note="over corruptions and severities",
        paper="corruptions",
    ),
    "mce": Metric(
        "mCE",
        "lower",
        note="mean over corruptions of error / error of dense, each summed over severities; 1 is "
        "as good as dense",
        paper="corruptions",
        of_dense=relative_error,
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
    """Which images are corrupted, how, and how strongly."""

    flat_classes = True
    metrics = METRICS
    page = OnPage(
        "corruptions",
        place=7,
        heading="Common corruptions",
        charts=(
            Chart(
                *("error", "severity", "Error under corruption", "Severity", "Error"),
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

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return a corruption's name in words."""
        return super().place_words(place).replace("_", " ")

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the corruptions."""
        return {"corruption": self.names or get_args(Name)}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put the error under each corruption at each severity, and means of them.

        The mean over all has its interval over images: one image's corruptions belong together.
        """
        test = subject.data.test
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        labels = subject.model.targets(torch.from_numpy(test.labels[where]))

        def hits_on(pixels: np.ndarray) -> Tensor:
            prediction, _ = predict_in_batches(subject.model, pixels, routing=False)
            return out.task.scores(prediction, labels)

        wrong = put_errors(hits_on, images, where, self, out)
        errors = errors_of(out.found())
        for name, row in errors.items():
            out.put("error", sum(row.values()) / len(row), corruption=name)
        for severity in sorted(self.severities):
            mean = sum(row[severity] for row in errors.values()) / len(errors)
            out.put("error", mean, severity=severity)
        mean = float(np.mean([np.mean([*row.values()]) for row in errors.values()]))
        out.put("corruption_error", bootstrap_mean(wrong)._replace(value=mean))


def errors_of(result: Found) -> Errors:
    """Return the error under each corruption at each severity."""
    errors: dict[Place, dict[Place, float]] = defaultdict(dict)
    for value in result.all("error"):
        if {"corruption", "severity"} <= set(value.at):
            errors[value.at["corruption"]][value.at["severity"]] = value.value
    return errors


def put_errors(
    hits_on: Callable[[np.ndarray], Tensor],
    images: np.ndarray,
    where: np.ndarray,
    settings: Corruptions,
    out: Values,
) -> np.ndarray:
    """Put the error under each corruption at each severity; return each image's share of errors
    over all of them, (N,).

    hits_on: images (N, C, H, W) to bool (N,), which are right; where: the images' places in the
    split, which their draws depend on.
    """
    wrong = []
    for name in settings.names or CORRUPTIONS:
        for severity in sorted(settings.severities):

            def packed_hits(name: str = name, severity: int = severity) -> str | list[float]:
                pixels = corrupt_images(images, name, severity, SEED, where)
                return out.task.encode_scores(hits_on(pixels))

            packed = out.parts(f"{name} {severity}", packed_hits)
            hits = out.task.decode_scores(packed, len(images))
            error = int((~hits).sum()) / len(hits)
            out.put("error", error, corruption=name, severity=severity)
            wrong.append(~hits.numpy())
    return np.mean(wrong, axis=0)


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

"""Classify corrupted test images: the error under each of fifteen corruptions at each severity.

    python -m stages.corruptions <phase> <method> <seed>
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data.corruptions import CORRUPTIONS, corrupted
from moecore.data.prepared import spread
from moecore.evaluation.classification import correct
from moecore.evaluation.intervals import Interval, bootstrap_mean, wilson
from moecore.evaluation.predict import predictions
from moecore.evaluation.robust import packed, unpacked
from moecore.history import Run
from moecore.kept import Kept, resumable
from moecore.params import read
from moecore.refusals import flat_images_with_classes
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


Severity = Annotated[int, Field(ge=1, le=5)]
Name = Literal[
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost", "fog",
    "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
]  # fmt: skip


class Corruptions(Config):
    """Which images are corrupted, how, and how strongly."""

    images: int | None = Field(300, ge=1, description="Test images, evenly spread over the split, the same for every method; null takes all.")
    severities: tuple[Severity, ...] = Field((1, 3, 5), min_length=1, description="1 to 5; a corruption's error is the mean over them.")
    names: tuple[Name, ...] | None = Field(None, min_length=1, description="Which of the fifteen; null takes all.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, description="Of the random ones; every method sees the same pictures.")

    @field_validator("severities", "names")
    @classmethod
    def _once(cls, listed: tuple | None) -> tuple | None:
        if listed and len(set(listed)) < len(listed):
            raise ValueError("the same value is listed twice")
        return listed


class Params(Config):
    corruptions: Corruptions


def row_of(name: str, severity: int, hits: Tensor) -> dict[str, Any]:
    """The error of N images, with its 95 % limits; hits: bool (N,)."""
    error, low, high = wilson(int((~hits).sum()), len(hits))
    return {"name": name, "severity": severity, "correct": int(hits.sum()), "error": error, "low": low, "high": high}


def measured(
    classify: Callable[[np.ndarray], Tensor], images: np.ndarray, where: np.ndarray, settings: Corruptions, kept: Kept
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """One row a corruption and severity, and each image's share of errors over all of them, (N,); where: the images' places in the split."""
    rows, wrong = [], []
    for name in settings.names or CORRUPTIONS:
        for severity in sorted(settings.severities):
            made = kept.part(f"{name} {severity}", lambda: packed(classify(corrupted(images, name, severity, settings.seed, where))))
            hits = unpacked(made, len(images))
            rows.append(row_of(name, severity, hits))
            wrong.append(~hits.numpy())
    return rows, np.mean(wrong, axis=0)


def by_corruption(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean error over the severities of each corruption."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    return {name: float(np.mean([row["error"] for row in rows if row["name"] == name])) for name in names}


def mean_of(wrong: np.ndarray) -> Interval:
    """Mean over images with its 95 % interval; one picture's corruptions belong together, so images are drawn, not rows."""
    return bootstrap_mean(wrong)


def corruptions(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, test = params.corruptions, flat_images_with_classes(Path("artifacts/data") / phase, "corruptions").test
    where = spread(len(test.labels), settings.images)
    images, labels = test.images[where], torch.from_numpy(test.labels[where])
    with resumable("corruptions", params, __file__, phase, method, seed) as (run, kept):
        model: nn.Module = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)

        def classify(pixels: np.ndarray) -> Tensor:
            return correct(predictions(model, pixels, settings.batch, routing=False)[0], labels)

        clean = row_of("clean", 0, classify(images))
        rows, wrong = measured(classify, images, where, settings, kept)
        errors, mean = by_corruption(rows), mean_of(wrong)
        _draw(run, rows, images[0], int(where[0]), settings)
        found = {"images": len(labels), "clean_error": clean["error"], "clean_low": clean["low"], "clean_high": clean["high"]}
        found |= {"mean_error": float(np.mean(list(errors.values()))), "mean_low": mean.low, "mean_high": mean.high}
        run.summary({**found, "by_corruption": errors, "corruptions": rows})


def _draw(run: Run, rows: list[dict[str, Any]], image: np.ndarray, index: int, settings: Corruptions) -> None:
    """The errors as a map, and what the corruptions do to the first image."""
    figures_noise = importlib.import_module("moecore.report.figures_noise")  # by name: a drawing is no input of a result

    severities, names = sorted(settings.severities), settings.names or tuple(CORRUPTIONS)
    made = {name: [corrupted(image[None], name, severity, settings.seed, [index])[0] for severity in severities] for name in names}
    run.figure("corruption_errors", figures_noise.corruption_errors(rows))
    run.figure("corruption_samples", figures_noise.corruption_samples(image, made, severities))


if __name__ == "__main__":
    run_stage(corruptions)

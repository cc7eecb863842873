"""Calibration of a trained model, and how sure it is of its classes, or words, before and after.

N images, K classes. Of a mosaic each cell has an answer; intervals are over mosaics. Ages are
calibrated by moecore.brain.age_calibration.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config, part_classes_by_kind
from moecore.core.files import UserError, write_sealed
from moecore.measure.base import MeasuredModel
from moecore.measure.calibrators.base import Calibrator, FittedCalibrator
from moecore.measure.calibrators.temperature import FittedTemperature, Temperature
from moecore.measure.word_confidence import FITTED, TokenLossAndConfidence, final_tokens
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Estimate, bootstrap_interval
from moecore.tasks.base import Task
from moecore.tasks.class_task import (
    ReliabilityBins,
    brier_scores,
    calibration_error,
    class_confidence,
    class_nll,
    reliability_bins,
    top1_hits,
)

OnRefusal = Literal["stop", "report"]


class TissueRidge(Config):
    """A baseline of ages: ridge regression on the volumes of the three tissues."""

    harmonise: Literal["none", "combat"] = Field(
        "none", description="combat: without what each site adds, fitted to the training sites"
    )
    reference: int = Field(
        0,
        ge=0,
        description="Of each test site that training lacks so many participants, the first by id, "
        "whose known ages place the site; they are in no error. 0: such a site is refused",
    )

    @model_validator(mode="after")
    def _reference_of_combat(self) -> Self:
        if self.reference and self.harmonise == "none":
            raise ValueError("reference: found some; allowed: 0, or harmonise: combat")
        return self


class Calibrate(Config):
    """What is fitted, and how many images a forward pass takes."""

    calibrator: Calibrator
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    on_refusal: OnRefusal = Field(
        "stop", description="Where no line can be fitted: stop, or report the raw predictions."
    )
    tissue_ridge: TissueRidge | None = Field(
        None, description="Of ages: the baseline that knows tissue volumes alone; null: none."
    )


class CalibrationFiles(NamedTuple):
    """What a calibration reads and writes beside the model and its data."""

    item: str  # phase/method/seed
    model: Path  # the folder of the trained model
    out_of_fold: Path  # the predictions.csv of the stage out_of_fold
    out: Path  # the folder that it writes


class PredictionQuality(Config):
    """How good predictions are, and how well their confidence says so."""

    score: Estimate
    nll: Estimate = Field(description="nats an image")
    brier: Estimate
    ece: Estimate
    bins: ReliabilityBins


class Result(Config):
    """The temperature, and the test split before and after it."""

    kind: Literal["temperature"] = "temperature"
    temperature: float | None = Field(None, description="null of another calibrator")
    at_limit: bool = False
    test_images: int
    scores: str | tuple[float, ...] = Field(
        description="one a test image, as the task packs them; both before and after"
    )
    top5: str | tuple[float, ...] | None = Field(
        None, description="likewise, whether the class is among the five largest"
    )
    before: PredictionQuality
    after: PredictionQuality


def check_calibrator_fits_task(settings: Calibrate, task: Task, phase: str) -> None:
    """Raise UserError where the calibrator is none for the labels of a phase."""
    if task.kind in settings.calibrator.tasks:
        return
    every = part_classes_by_kind(Calibrator)
    allowed = [kind for kind, part in every.items() if task.kind in part.tasks]
    if not allowed:
        raise UserError(
            f"calibrate: no calibrator knows the task {task.kind} of data.{phase}; allowed: phases "
            f"with one class or one real number per image (leave {phase} out of run.phases)"
        )
    raise UserError(
        f"calibrate.calibrator.kind: found {settings.calibrator.kind}; the task of data.{phase} is "
        f"{task.kind}; allowed: {', '.join(allowed)}"
    )


def calibrate_classes(
    subject: MeasuredModel, settings: Calibrate, files: CalibrationFiles
) -> Result:
    """The calibrator, fitted to the validation split and written to ``files.out``."""
    calibrator = settings.calibrator
    if subject.data.task.long and isinstance(calibrator, Temperature):
        return _calibrate_words(subject, settings, calibrator, files)
    data = subject.data
    said = {
        name: predict_in_batches(subject.model, split.images, settings.batch, routing=False)[0]
        for name, split in (("validation", data.validation), ("test", data.test))
    }
    known = labels_as_tensor(data.validation.labels)
    fitted = calibrator.fit(logits_by_answer(said["validation"], known), known.flatten())
    _write_fit(fitted, files)
    labels = labels_as_tensor(data.test.labels)
    task = data.task
    among = task.top5(said["test"], labels)
    after = fitted.apply(logits_by_answer(said["test"], labels)).view_as(said["test"])
    return Result(
        temperature=fitted.temperature if isinstance(fitted, FittedTemperature) else None,
        at_limit=isinstance(fitted, FittedTemperature) and fitted.at_limit,
        test_images=len(said["test"]),
        scores=task.encode_scores(task.scores(said["test"], labels)),
        top5=None if among is None else task.encode_scores(among),
        before=prediction_quality(task, said["test"], labels),
        after=prediction_quality(task, after, labels),
    )


def _calibrate_words(
    subject: MeasuredModel, settings: Calibrate, calibrator: Temperature, files: CalibrationFiles
) -> Result:
    """Calibrate the next words of a text: an item is a block, and intervals are over blocks."""
    data = subject.data
    model = cast(LanguageTransformer, subject.model)
    known = final_tokens(model, data.validation, settings.batch, FITTED)
    fitted = calibrator.fit_slope(known.nll_slope, tolerance=1e-7)
    _write_fit(fitted, files)
    test = final_tokens(model, data.test, settings.batch)
    before, after = test.answers(1.0, fitted.temperature)
    return Result(
        temperature=fitted.temperature,
        at_limit=fitted.at_limit,
        test_images=len(test.labels),
        scores=data.task.encode_scores(before.nats.mean(dim=1)),
        before=quality_from_losses(data.task, before.nats.mean(dim=1), before),
        after=quality_from_losses(data.task, after.nats.mean(dim=1), after),
    )


def _write_fit(fitted: FittedCalibrator, files: CalibrationFiles) -> None:
    write_sealed(files.out / "calibrator.json", fitted.model_dump(mode="json"))


def prediction_quality(task: Task, logits: Tensor, labels: Tensor) -> PredictionQuality:
    """Score, NLL, Brier and ECE with intervals over images, and bins.

    logits: (N, K) with labels (N,), or (N, C·K) with those of C cells, (N, C).
    """
    rows, right = logits_by_answer(logits, labels), labels.flatten()
    by_row = (
        class_nll(rows, right),
        brier_scores(rows, right),
        class_confidence(rows),
        top1_hits(rows, right),
    )
    answers = TokenLossAndConfidence(*(values.view(labels.shape) for values in by_row))
    return quality_from_losses(task, task.scores(logits, labels), answers)


def logits_by_answer(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a row of logits for each label, (labels, K): an image's, or of each of its cells."""
    return logits.reshape(labels.numel(), -1)


def quality_from_losses(
    task: Task, scores: Tensor, answers: TokenLossAndConfidence
) -> PredictionQuality:
    """Return what answers to N items are worth, as ``prediction_quality`` does."""
    losses, squares = answers.nats.numpy(), answers.squares.numpy()
    sure, hits = answers.sure, answers.hits

    def resampled(statistic: Callable[[np.ndarray], float]) -> Estimate:
        return Estimate.of(bootstrap_interval(statistic, len(scores), lowest=0.0))

    return PredictionQuality(
        score=Estimate.of(task.interval(scores)),
        nll=resampled(lambda chosen: float(losses[chosen].mean())),
        brier=resampled(lambda chosen: float(squares[chosen].mean())),
        ece=resampled(
            lambda chosen: calibration_error(sure[chosen].flatten(), hits[chosen].flatten())
        ),
        bins=reliability_bins(sure.flatten(), hits.flatten()),
    )


def labels_as_tensor(labels: np.ndarray) -> Tensor:
    """Labels of a split that is mapped into memory, as a tensor of their own."""
    return torch.from_numpy(np.array(labels))

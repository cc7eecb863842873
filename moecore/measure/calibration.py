"""Calibration of a trained model, and how sure it is of its classes, or words, before and after.

N images, K classes. Of a mosaic each cell has an answer; intervals are over mosaics. Ages are
calibrated by moecore.brain.age_calibration.
"""

from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config, part_classes_by_kind
from moecore.core.files import UserError, write_sealed
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.calibrators.base import Calibrator, FittedCalibrator
from moecore.measure.calibrators.temperature import FittedTemperature, Temperature
from moecore.measure.values import Metric, OnPage, Values
from moecore.measure.word_confidence import FITTED, TokenLossAndConfidence, final_tokens
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_interval
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


class ModelCalibration(Measurement, ABC):
    """What the stage ``calibrate`` does with one model: it fits, writes files and puts values."""

    settings: Calibrate
    files: CalibrationFiles


METRICS = {
    "ece_before": Metric("ECE", "lower", note="expected calibration error, 15 bins"),
    "ece_after": Metric("ECE, calibrated", "lower", note="fitted to the validation split"),
    "nll_after": Metric("NLL, calibrated", "lower"),  # nats an image
    "brier_after": Metric("Brier, calibrated", "lower"),
    "nll_before": Metric(""),
    "brier_before": Metric(""),
    "score_before": Metric(""),
    "score_after": Metric(""),
    "temperature": Metric(""),  # of no other calibrator
}


class PredictionQuality(NamedTuple):
    """How good predictions are, and how well their confidence says so."""

    score: Interval
    nll: Interval  # nats an image
    brier: Interval
    ece: Interval
    bins: ReliabilityBins


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


class ClassCalibration(ModelCalibration):
    """Of classes, or of the next words of a text."""

    metrics = METRICS
    page = OnPage("calibration", place=2)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Fit to the validation split, and put the quality of the test split before and after.

        facts: at_limit, whether the temperature is the largest or smallest that is tried; bins,
        before and after; scores, one of each of test_images as the task packs them, the same before
        and after; top5, likewise, whether the class is among the five largest.
        """
        calibrator = self.settings.calibrator
        if subject.data.task.long and isinstance(calibrator, Temperature):
            self._measure_words(subject, calibrator, out)
            return
        data = subject.data
        predictions = {
            name: predict_in_batches(
                subject.model, split.images, self.settings.batch, routing=False
            )[0]
            for name, split in (("validation", data.validation), ("test", data.test))
        }
        known = labels_as_tensor(data.validation.labels)
        fitted = calibrator.fit(logits_by_answer(predictions["validation"], known), known.flatten())
        self._write_fit(fitted, out)
        labels, before = labels_as_tensor(data.test.labels), predictions["test"]
        task = data.task
        among = task.top5(before, labels)
        after = fitted.apply(logits_by_answer(before, labels)).view_as(before)
        put_quality(prediction_quality(task, before, labels), "before", out)
        put_quality(prediction_quality(task, after, labels), "after", out)
        out.facts["test_images"] = len(before)
        out.facts["scores"] = task.encode_scores(task.scores(before, labels))
        out.facts["top5"] = None if among is None else task.encode_scores(among)

    def _measure_words(self, subject: MeasuredModel, calibrator: Temperature, out: Values) -> None:
        """Calibrate the next words of a text: an item is a block, and intervals are over blocks."""
        data = subject.data
        model = cast(LanguageTransformer, subject.model)
        known = final_tokens(model, data.validation, self.settings.batch, FITTED)
        fitted = calibrator.fit_slope(known.nll_slope, tolerance=1e-7)
        self._write_fit(fitted, out)
        test = final_tokens(model, data.test, self.settings.batch)
        before, after = test.answers(1.0, fitted.temperature)
        for when, answers in (("before", before), ("after", after)):
            nats = answers.nats.mean(dim=1)
            put_quality(quality_from_losses(data.task, nats, answers), when, out)
        out.facts["test_images"] = len(test.labels)
        out.facts["scores"] = data.task.encode_scores(before.nats.mean(dim=1))
        out.facts["top5"] = None

    def _write_fit(self, fitted: FittedCalibrator, out: Values) -> None:
        write_sealed(self.files.out / "calibrator.json", fitted.model_dump(mode="json"))
        if isinstance(fitted, FittedTemperature):
            out.put("temperature", fitted.temperature)
            out.facts["at_limit"] = fitted.at_limit


def put_quality(quality: PredictionQuality, when: str, out: Values) -> None:
    """Put the numbers before, or after, calibration, and keep the bins."""
    for name, value in quality._asdict().items():
        if isinstance(value, ReliabilityBins):
            out.facts.setdefault("bins", {})[when] = value
        else:
            out.put(f"{name}_{when}", value)


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

    def resampled(statistic: Callable[[np.ndarray], float]) -> Interval:
        return bootstrap_interval(statistic, len(scores), lowest=0.0)

    return PredictionQuality(
        score=task.interval(scores),
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

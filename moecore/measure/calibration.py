"""Calibrate class and word probabilities, and measure their quality before and after.

N images, K classes; N blocks of M tokens, d width, V words. Each cell of a mosaic has an answer;
intervals are over mosaics. Ages are calibrated by moecore.brain.age_calibration.
"""

from abc import ABC
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config, part_classes_by_kind
from moecore.core.files import UserError, write_json_sha256
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.calibrators import temperature
from moecore.measure.calibrators.base import Calibrator, FittedCalibrator
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn import predict
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.statistics.intervals import Interval, bootstrap_statistic
from moecore.tasks import base, class_task

FIT_TOKENS = 2**14  # tokens of the validation text that the temperature is fitted to


class HeadInputsAndLabels(NamedTuple):
    model: LanguageTransformer
    final: Tensor  # (N, M, d), on the model's device
    labels: Tensor  # (N, M), the words after them

    def iterate_logits_and_labels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits (n, V) fp32 and labels (n,) of all tokens, in chunks."""
        # the logits of a whole text would take gigabytes
        rows = predict.logits_chunk_size(self.model.image.task.outputs, self.final.device)
        final = self.final.flatten(0, 1).split(rows)
        labels = self.labels.flatten().split(rows)
        with torch.no_grad():
            for tokens, targets in zip(final, labels, strict=True):
                yield self.model.predict(tokens[None])[0].float(), targets

    def nll_slope(self, beta: float) -> float:
        """Return the derivative of the mean NLL per word, in nats, with respect to β = 1/T."""
        total = 0.0
        for logits, targets in self.iterate_logits_and_labels():
            total += float(temperature.nll_derivative_by_row(logits, targets, beta).double().sum())
        return total / self.labels.numel()

    def losses_and_confidences(self, *temperatures: float) -> list["TokenLossAndConfidence"]:
        """Return, per temperature, each token's loss and confidence with logits divided by it."""
        by_temperature: list[list[tuple[Tensor, ...]]] = [[] for _ in temperatures]
        for logits, targets in self.iterate_logits_and_labels():
            for answers, value in zip(by_temperature, temperatures, strict=True):
                log_probs = (logits / value).log_softmax(dim=1)
                right = log_probs.gather(1, targets[:, None])[:, 0]
                best, word = log_probs.max(dim=1)
                # in place, as (n, V) is large; ``right`` and ``best`` are copies
                squares = log_probs.exp_().square().sum(dim=1) - 2 * right.exp() + 1
                answers.append((-right, squares, best.exp(), word == targets))
        joined = []
        for parts in by_temperature:
            columns = [torch.cat(field).cpu() for field in zip(*parts, strict=True)]
            nats, squares, confidence, hits = (field.view(self.labels.shape) for field in columns)
            numbers = (nats.double(), squares.double(), confidence.double())
            joined.append(TokenLossAndConfidence(*numbers, hits))
        return joined


class TokenLossAndConfidence(NamedTuple):
    """NLL in nats, Brier score, confidence, hit per token (N blocks, M tokens) or image (N,)."""

    nats: Tensor
    squares: Tensor  # Brier score
    confidence: Tensor  # the largest probability
    hits: Tensor  # bool, whether the most probable word is right


def collect_head_inputs(
    model: LanguageTransformer, split: Split, batch: int, max_tokens: int | None = None
) -> HeadInputsAndLabels:
    """Return the inputs of the head for about ``max_tokens`` tokens of a split (None: all)."""
    blocks = None if max_tokens is None else max(1, max_tokens // split.labels.shape[1])
    indices = evenly_spaced_indices(len(split.labels), blocks)
    device = predict.model_device(model)
    chunks = []
    with predict.eval_mode(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for tokens in predict.image_batches(np.array(split.images[indices]), batch, device):
            chunks.append(model.encode(tokens)[0].float())
    labels = torch.from_numpy(np.array(split.labels[indices])).long().to(device)
    return HeadInputsAndLabels(model, torch.cat(chunks), labels)


OnRefusal = Literal["stop", "report"]


class TissueVolumeRidgeSettings(Config):
    """Settings of a baseline for ages: ridge regression on the volumes of the three tissues."""

    harmonise: Literal["none", "combat"] = Field(
        "none", description="combat: site effects removed, as estimated on the training sites"
    )
    reference: int = Field(
        0,
        ge=0,
        description="Participants (the first by id) of each test site without training data, whose "
        "known ages estimate the site's effect; they are left out of the error. 0: such a site is "
        "refused",
    )

    @model_validator(mode="after")
    def _check_reference_needs_combat(self) -> Self:
        if self.reference and self.harmonise == "none":
            raise ValueError("reference: found some; allowed: 0, or harmonise: combat")
        return self


class Calibrate(Config):
    """Settings of the stage ``calibrate``: calibrator, behaviour without a fit, age baseline."""

    calibrator: Calibrator
    batch: int = Field(256, ge=1, description="Images per pass; results do not depend on it.")
    on_refusal: OnRefusal = Field("stop", description="No line: stop, or raw predictions.")
    tissue_ridge: TissueVolumeRidgeSettings | None = Field(
        None, description="Age from volumes; null: none."
    )


class CalibrationPaths(NamedTuple):
    item: str  # phase/method/seed
    model: Path  # folder of the trained model
    out_of_fold: Path  # predictions.csv of the stage out_of_fold
    out: Path  # folder that it writes


class CalibrationMeasurementBase(Measurement, ABC):
    """Base of the stage ``calibrate``'s measurements, which fit a calibrator and write files."""

    settings: Calibrate
    files: CalibrationPaths


METRICS = {
    "ece_before": Metric("ECE", "lower", note="expected calibration error, 15 bins"),
    "ece_after": Metric("ECE, calibrated", "lower", note="fitted to the validation split"),
    "nll_after": Metric("NLL, calibrated", "lower"),  # nats per image
    "brier_after": Metric("Brier, calibrated", "lower"),
    "nll_before": Metric(""),
    "brier_before": Metric(""),
    "score_before": Metric(""),
    "score_after": Metric(""),
    "temperature": Metric(""),  # of the calibrator ``temperature`` alone
}


class PredictionQuality(NamedTuple):
    score: Interval
    nll: Interval  # nats per image
    brier: Interval
    ece: Interval
    bins: class_task.ReliabilityBins


def check_calibrator_fits_task(settings: Calibrate, task: base.Task, phase: str) -> None:
    if task.kind in settings.calibrator.tasks:
        return
    parts = part_classes_by_kind(Calibrator)
    kinds = [kind for kind, part in parts.items() if task.kind in part.tasks]
    if not kinds:
        raise UserError(
            f"calibrate: no calibrator knows the task {task.kind} of data.{phase}; allowed: phases "
            f"with one class or one real number per image (leave {phase} out of run.phases)"
        )
    raise UserError(
        f"calibrate.calibrator.kind: found {settings.calibrator.kind}; the task of data.{phase} is "
        f"{task.kind}; allowed: {', '.join(kinds)}"
    )


class ClassCalibration(CalibrationMeasurementBase):
    """Calibration of classes, or of the next words of a text."""

    metrics = METRICS
    page = OnPage("calibration", place=2)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Fit the calibrator on validation; put score, NLL, Brier and ECE before and after."""
        # facts: at_limit, whether the temperature is at its largest or smallest; bins, before and
        # after; scores, one per test image as the task packs them, equal before and after; top5,
        # likewise, whether the class is among the five largest.
        calibrator = self.settings.calibrator
        if subject.data.task.long and isinstance(calibrator, temperature.Temperature):
            self._calibrate_next_words(subject, calibrator, out)
            return
        data = subject.data
        run = partial(predict.predict_in_batches, batch=self.settings.batch, routing=False)
        splits = {"validation": data.validation, "test": data.test}
        predictions = {name: run(subject.model, splits[name].images)[0] for name in splits}
        truth = labels_as_tensor(data.validation.labels)
        fitted = calibrator.fit(reshape_by_label(predictions["validation"], truth), truth.flatten())
        self._write_fit(fitted, out)
        labels = labels_as_tensor(data.test.labels)
        before = predictions["test"]
        task = data.task
        top5 = task.top5(before, labels)
        after = fitted.apply(reshape_by_label(before, labels)).view_as(before)
        put_quality(prediction_quality(task, before, labels), "before", out)
        put_quality(prediction_quality(task, after, labels), "after", out)
        out.facts["test_images"] = len(before)
        out.facts["scores"] = task.encode_scores(task.scores(before, labels))
        out.facts["top5"] = None if top5 is None else task.encode_scores(top5)

    def _calibrate_next_words(
        self, subject: MeasuredModel, calibrator: temperature.Temperature, out: Values
    ) -> None:
        """Fit and put as ``measure`` does, for next words; intervals are over text blocks."""
        data = subject.data
        model = cast(LanguageTransformer, subject.model)
        validation = collect_head_inputs(model, data.validation, self.settings.batch, FIT_TOKENS)
        fitted = calibrator.fit_by_derivative(validation.nll_slope, tolerance=1e-7)
        self._write_fit(fitted, out)
        test = collect_head_inputs(model, data.test, self.settings.batch)
        before, after = test.losses_and_confidences(1.0, fitted.temperature)
        for when, answers in (("before", before), ("after", after)):
            nats = answers.nats.mean(dim=1)
            put_quality(quality_from_losses(data.task, nats, answers), when, out)
        out.facts["test_images"] = len(test.labels)
        out.facts["scores"] = data.task.encode_scores(before.nats.mean(dim=1))
        out.facts["top5"] = None

    def _write_fit(self, fitted: FittedCalibrator, out: Values) -> None:
        write_json_sha256(self.files.out / "calibrator.json", fitted.model_dump(mode="json"))
        if isinstance(fitted, temperature.FittedTemperature):
            out.put("temperature", fitted.temperature)
            out.facts["at_limit"] = fitted.at_limit


def put_quality(quality: PredictionQuality, when: str, out: Values) -> None:
    """Put score, NLL, Brier, ECE as ``{name}_{when}`` (before, after), bins as data for pages."""
    for name, value in quality._asdict().items():
        if isinstance(value, class_task.ReliabilityBins):
            out.facts.setdefault("bins", {})[when] = value
        else:
            out.put(f"{name}_{when}", value)


def prediction_quality(task: base.Task, logits: Tensor, labels: Tensor) -> PredictionQuality:
    """Return score, NLL, Brier score and ECE with intervals over images, and reliability bins."""
    # logits: (N, K) with labels (N,), or (N, C·K) with labels of C cells, (N, C).
    rows = reshape_by_label(logits, labels)
    right = labels.flatten()
    losses = (class_task.class_nll(rows, right), class_task.brier_scores(rows, right))
    by_row = (*losses, class_task.class_confidence(rows), class_task.top1_hits(rows, right))
    answers = TokenLossAndConfidence(*(values.view(labels.shape) for values in by_row))
    return quality_from_losses(task, task.scores(logits, labels), answers)


def reshape_by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Reshape logits to one row per label, (labels, K): per image, or per cell of a mosaic."""
    return logits.reshape(labels.numel(), -1)


def quality_from_losses(
    task: base.Task, scores: Tensor, answers: TokenLossAndConfidence
) -> PredictionQuality:
    """Return the quality of N items from their scores (N,) and their predictions' losses."""
    losses, squares = answers.nats.numpy(), answers.squares.numpy()
    confidence, hits = answers.confidence, answers.hits

    def bootstrap(statistic: Callable[[np.ndarray], float]) -> Interval:
        return bootstrap_statistic(statistic, len(scores), lowest=0.0)

    def error(rows: np.ndarray) -> float:
        return class_task.calibration_error(confidence[rows].flatten(), hits[rows].flatten())

    return PredictionQuality(
        score=task.interval(scores),
        nll=bootstrap(lambda resample: float(losses[resample].mean())),
        brier=bootstrap(lambda resample: float(squares[resample].mean())),
        ece=bootstrap(error),
        bins=class_task.reliability_bins(confidence.flatten(), hits.flatten()),
    )


def labels_as_tensor(labels: np.ndarray) -> Tensor:
    """Return memory-mapped labels as a tensor, copied."""
    return torch.from_numpy(np.array(labels))

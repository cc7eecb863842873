"""Base class of tasks, with defaults for their losses, scores and checks of labels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config, Part
from moecore.core.files import UserError
from moecore.core.streams import BatchDraws
from moecore.statistics.comparisons import bootstrap_interval
from moecore.statistics.intervals import Estimate, Interval, bootstrap_mean, mean_share

Reduction = Literal["mean", "none"]


def check_label_range(labels: np.ndarray, number: int, what: str) -> None:
    if labels.size and not 0 <= labels.min() <= labels.max() < number:
        raise UserError(f"{what} are {labels.min()} to {labels.max()}; allowed: 0 to {number - 1}")


def label_shape_error(labels: np.ndarray, what: str, allowed: str) -> UserError:
    return UserError(f"{what} have the shape {labels.shape}; allowed: {allowed} in every split")


class Score(NamedTuple):
    """Name, unit and direction of a task's main metric, the mean of one score per image."""

    name: str  # "accuracy", "precision_at_1", "mae"; a key in results and in claims
    label: str  # the same in words, without a unit
    unit: str  # "years"; "" for a share
    form: Literal["share", "number"]  # a share is shown in percent
    better: Literal["higher", "lower"]  # which values are better


class ExtraTestMetrics(Config):
    """Metrics of a test split in addition to score and loss; None where a task has none."""

    test_correct: int | None = None  # images
    test_top5: Estimate | None = None  # share of images whose class is among the five largest
    confusion: tuple[tuple[int, ...], ...] | None = None  # by (true class, predicted class)
    false_discovery_rate: float | None = None  # 1 − precision at 1
    median_mae: float | None = None  # of a constant answer, the median of the training labels
    # Perplexity as in papers: as many streams as in training, an empty cache, complete blocks only.
    ppl: float | None = None
    ppl_all: float | None = None  # perplexity over every token once, in one stream


class Task(Part, ABC):
    """Base of all tasks: losses, scores and checks for labels of one form, such as classes.

    Default methods are for labels that are one real number per image, as in regression.
    """

    of_text: ClassVar[bool] = False  # a prediction per word; no views, no pixels
    of_captions: ClassVar[bool] = False  # captions, read by a second tower

    classes: tuple[str, ...] = Field(default=(), max_length=0, exclude=True, description="none")

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of outputs of the head, K."""

    @property
    @abstractmethod
    def answers(self) -> tuple[str, ...]:
        """Names of the possible answers. Models with equal answers can exchange heads."""

    @property
    @abstractmethod
    def score(self) -> Score:
        """Name, label and unit of ``scores``."""

    @property
    def cells(self) -> int:
        """Number of predictions per image, one per cell of a mosaic; 1 without cells."""
        return 1

    @property
    def long(self) -> bool:
        """True if predictions are too large to store, so that each batch is scored at once."""
        return False

    @property
    def history_name(self) -> str:
        """Key of the mean score in a training history, without the prefix train_ or validation_."""
        return self.score.name

    @property
    def head(self) -> tuple[float, float]:
        """(mean, deviation) of the head: prediction = the head's output · deviation + mean."""
        return 0.0, 1.0

    def predict(self, output: Tensor) -> Tensor:
        """Return the prediction (B, K) of an output (B, K) of the head."""
        return output

    def drawn(self, labels: Tensor, draws: BatchDraws) -> Tensor:
        """Return one step's labels, e.g. one random caption per image; default: ``labels``."""
        return labels

    @abstractmethod
    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the training loss, fp32: a scalar, or (B,) with ``reduction`` "none"."""

    def refuse_label_smoothing(self, label_smoothing: float) -> None:
        """Raise UserError unless ``label_smoothing`` is 0; for losses without label smoothing."""
        if label_smoothing:
            text = f"{label_smoothing}, but {self.needs_classes('label_smoothing')}"
            raise UserError.at("label_smoothing", found=text, allowed=0)

    def with_gallery(self, labels: Tensor) -> Self:
        """Return a task whose attack loss has all ``labels`` (N, …) as negatives; default: self."""
        return self

    @abstractmethod
    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that an attack maximises, (B,), in the prediction's dtype."""

    @abstractmethod
    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that is reported for a test split, (N,) fp64."""

    @abstractmethod
    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return one score per image, (N,): bool if an image is right or wrong, else fp64."""

    def top5(self, prediction: Tensor, labels: Tensor) -> Tensor | None:
        """Return top-5 hits (N,) bool; None without one class per image, or with K ≤ 5."""
        return None

    @abstractmethod
    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        """Return the sum of a batch's scores, a scalar on its device, for a running mean."""
        # learned: (M,) int64 image indices; their mean score times B is returned instead.

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        """Return the mean of ``scores``, as reported for a validation split after each epoch."""
        return float(self.scores(prediction, labels).mean())

    def interval(self, scores: Tensor, people: np.ndarray | None = None) -> Interval:
        """Return the mean of scores (N,) with its 95 % interval; people: (N,) person per image."""
        mean = mean_share if self.score.form == "share" else bootstrap_mean
        return mean(scores.double().numpy(), people=people)

    def worse_scores(self, one: Tensor, other: Tensor) -> Tensor:
        """Return, per image, the worse of its two scores, each (N,)."""
        if self.score.better == "higher":
            return torch.minimum(one, other)
        return torch.maximum(one, other)

    def difference(
        self, one: Tensor, other: Tensor, level: float = 0.95, people: np.ndarray | None = None
    ) -> Interval:
        """Return the mean of ``one`` − ``other``, two models' scores (N,), with its interval."""
        resamples = max(1000, round(50 / (1 - level)))
        return bootstrap_interval(one.numpy(), other.numpy(), resamples, level=level, people=people)

    @abstractmethod
    def baseline_score(self, labels: Tensor) -> float:
        """Return the mean score that the best constant answer has for ``labels`` (N, …)."""

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return the extra metrics of a test split; train_labels: of the training split."""
        return ExtraTestMetrics()

    def encode_scores(self, scores: Tensor) -> str | list[float]:
        """Encode scores (N,) for a result file: as a list of numbers, or hits as base64 text."""
        return scores.double().tolist()

    def decode_scores(self, kept: str | Sequence[float], images: int) -> Tensor:
        """Decode the scores (N,) of ``images`` images in ``kept``, from ``encode_scores``."""
        if isinstance(kept, str) or len(kept) != images:
            raise ValueError(f"{images} numbers are needed, one per item")
        return torch.tensor(kept, dtype=torch.float64)

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the image index (M,) and class (M,) of each of M labels; None without classes."""
        return None

    def counts(self, labels: np.ndarray) -> list[int]:
        """Return the number of images of each of K classes; [] if labels are not classes."""
        return []

    @abstractmethod
    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        """Return the shape and dtype of the stored labels of ``images`` images."""

    @abstractmethod
    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless labels (N, …) fit this task; the message begins with ``what``."""

    @classmethod
    @abstractmethod
    def needs_classes(cls, what: str) -> str | None:
        """Return the reason why this task's labels do not allow ``what``, or None if they do.

        what: a feature ("label_smoothing", "shots", "mix" of images, "distillation", "class_maps"
        of experts) or a property: "classes", "one_class" (one per image), "decision" (one right
        class), "share" (an image is right or wrong), "confidence" (answers have a probability).
        """

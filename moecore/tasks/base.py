"""Base class of tasks: what each answers for; the one place where labels are looked at.

B images of a batch, N images of a split, K outputs of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config, Part
from moecore.core.streams import BatchDraws
from moecore.statistics.intervals import Estimate, Interval, bootstrap_mean, mean_share
from moecore.statistics.paired import paired_bootstrap

Reduction = Literal["mean", "none"]


class Score(NamedTuple):
    """What a table shows of predictions: the mean of one score per image."""

    name: str  # "accuracy", "precision_at_1", "mae"; a key in results and in claims
    label: str  # the same in words, without a unit
    unit: str  # "years"; "" for a share
    form: Literal["share", "number"]  # a share is shown in percent
    better: Literal["higher", "lower"]


class ExtraTestMetrics(Config):
    """What is reported of a test split beside score and loss; a task fills in what it knows."""

    test_correct: int | None = None  # images
    test_top5: Estimate | None = None  # share of images whose class is among the five largest
    confusion: tuple[tuple[int, ...], ...] | None = None  # by (true class, predicted class)
    false_discovery_rate: float | None = None  # 1 − precision at 1
    median_mae: float | None = None  # of answering always with the median of the training labels
    ppl: float | None = None  # as papers count it: training's streams, from nothing, whole blocks
    ppl_all: float | None = None  # every token once, in one stream


class Task(Part, ABC):
    """One kind of labels: what is learned, what is measured, what an attack may do to it.

    Defaults are those of one real number per item that is no class.
    """

    of_text: ClassVar[bool] = False  # a prediction at every word, so no views and no pixels
    of_captions: ClassVar[bool] = False  # which a second tower reads

    classes: tuple[str, ...] = Field(
        (), max_length=0, exclude=True, description="names of the classes; none here"
    )

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Width of the head."""

    @property
    @abstractmethod
    def answers(self) -> tuple[str, ...]:
        """Return what is asked; models with the same answers may exchange their heads."""

    @property
    @abstractmethod
    def score(self) -> Score:
        """Return how ``scores`` are called and shown."""

    @property
    def cells(self) -> int:
        """Return how many places of an image are answered, with K outputs each."""
        return 1

    @property
    def long(self) -> bool:
        """Return whether predictions are too long to be kept: they are scored as they come."""
        return False

    @property
    def history_name(self) -> str:
        """Return how the mean score is called in a history: train_…, validation_…."""
        return self.score.name

    @property
    def head(self) -> tuple[float, float]:
        """(mean, deviation): a prediction is output · deviation + mean; (0, 1) for logits."""
        return 0.0, 1.0

    def predict(self, output: Tensor) -> Tensor:
        """Return the prediction (B, K) that an output (B, K) of the head stands for."""
        return output

    def drawn(self, labels: Tensor, draws: BatchDraws) -> Tensor:
        """Return what a step learns of the labels (B, …) of its images: all, unless said."""
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

    def with_gallery(self, labels: Tensor) -> Self:
        """Return the task whose attacks compare with all ``labels`` (N, …), or itself."""
        return self

    @abstractmethod
    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return what an attack makes large, (B,), in the prediction's dtype."""

    @abstractmethod
    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the loss as it is reported of a test split, (N,) fp64."""

    @abstractmethod
    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return one score per image, (N,): bool where it is right or wrong, else fp64."""

    def top5(self, prediction: Tensor, labels: Tensor) -> Tensor | None:
        """Return whether the label is among the five most likely answers, (N,) bool.

        None for five classes at most, several labels an image, or labels that are no classes.
        """
        return None

    @abstractmethod
    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        """Return the sum of a training batch's scores, on its device and unchecked.

        Of mixed images the larger share counts. learned: (M,) int64, the images that stand for all
        of the batch; None for each for itself.
        """

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        """Return the mean of ``scores``, as a validation split reports it after each epoch."""
        return float(self.scores(prediction, labels).mean())

    def interval(self, scores: Tensor, people: np.ndarray | None = None) -> Interval:
        """Return the mean of scores (N,) with its 95 % interval over images.

        people: (N,), whose image each is; the interval is then over people.
        """
        mean = mean_share if self.score.form == "share" else bootstrap_mean
        return mean(scores.double().numpy(), people=people)

    def worse_scores(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the worse of two scores of each image: what an adversary who may choose leaves."""
        return (torch.minimum if self.score.better == "higher" else torch.maximum)(one, other)

    def difference(
        self, one: Tensor, other: Tensor, level: float = 0.95, people: np.ndarray | None = None
    ) -> Interval:
        """Return the mean of ``one`` − ``other``, scores (N,) of the same images, with interval."""
        resamples = max(1000, round(50 / (1 - level)))
        return paired_bootstrap(one.numpy(), other.numpy(), resamples, level=level, people=people)

    @abstractmethod
    def baseline_score(self, labels: Tensor) -> float:
        """Return the mean score of the best answer that does not look at the image."""

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return what else is reported of a test split; train_labels: of the training split."""
        return ExtraTestMetrics()

    def encode_scores(self, scores: Tensor) -> str | list[float]:
        """Return scores (N,) as a result keeps them."""
        return scores.double().tolist()

    def decode_scores(self, kept: str | Sequence[float], images: int) -> Tensor:
        """Return the scores (N,) that ``encode_scores`` made ``kept`` of."""
        if isinstance(kept, str) or len(kept) != images:
            raise ValueError(f"{images} numbers are needed, one per item")
        return torch.tensor(kept, dtype=torch.float64)

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (rows, classes), each (M,): an image once for each label; None without classes."""
        return None

    def counts(self, labels: np.ndarray) -> list[int]:
        """Return how many images have each class; [] where labels are no classes."""
        return []

    @abstractmethod
    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        """Return shape and dtype of the labels of a split of ``images`` images, as a file has."""

    @abstractmethod
    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError, beginning with ``what``, unless labels (N, …) are of this task."""

    @classmethod
    @abstractmethod
    def needs_classes(cls, what: str) -> str | None:
        """Return why ``what`` cannot be done with such labels, in words for the user, or None.

        what: "label_smoothing", "shots", "mix", "distillation", "decision" (one right class),
        "share" (an image is right or wrong), "classes" (there are any), "one_class" (one per
        image), "confidence" (an answer has a probability).
        """

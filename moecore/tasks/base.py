"""What every task answers for: the one place where labels are looked at.

B images of a batch, N images of a split, K outputs of the head.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from moecore.core.config import Config
from moecore.core.streams import Draws
from moecore.statistics.intervals import Estimate, Interval

Reduction = Literal["mean", "none"]


class Score(NamedTuple):
    """What a table shows of predictions: the mean of one score an image."""

    name: str  # "accuracy", "precision_at_1", "mae"; a key in results and in claims
    label: str  # the same in words, without a unit
    unit: str  # "years"; "" for a share
    form: Literal["share", "number"]  # a share is shown in percent
    better: Literal["higher", "lower"]


class Details(Config):
    """What is reported of a test split beside score and loss; a task fills in what it knows."""

    test_correct: int | None = None  # images
    test_top5: Estimate | None = None  # share of images whose class is among the five largest
    confusion: tuple[tuple[int, ...], ...] | None = None  # by (true class, predicted class)
    false_discovery_rate: float | None = None  # 1 − precision at 1
    median_mae: float | None = None  # of answering always with the median of the training labels
    ppl: float | None = None  # as papers count it: training's streams, from nothing, whole blocks
    ppl_all: float | None = None  # every token once, in one stream
    test_corr: float | None = None  # of ŷ − y with y
    test_slope: float | None = None  # b of the least squares ŷ = a + b·y
    test_intercept: float | None = None  # a


class Task(Protocol):
    """One kind of labels: what is learned, what is measured, what an attack may do to it."""

    @property
    def kind(self) -> Any:
        """The file's stem, as in a data card."""
        ...

    @property
    def outputs(self) -> int:
        """Width of the head."""
        ...

    @property
    def answers(self) -> tuple[str, ...]:
        """What is asked; models with the same answers may exchange their heads."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () where labels are no classes."""
        ...

    @property
    def score(self) -> Score:
        """How ``scores`` are called and shown."""
        ...

    @property
    def long(self) -> bool:
        """Whether the predictions of a split are too long to be kept: they are scored as they
        come.
        """
        ...

    @property
    def logged(self) -> str:
        """How the mean score is called in a history: train_…, validation_…."""
        ...

    @property
    def head(self) -> tuple[float, float]:
        """(mean, deviation): a prediction is output · deviation + mean; (0, 1) for logits."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """The prediction (B, K) that an output (B, K) of the head stands for."""
        ...

    def drawn(self, labels: Tensor, draws: Draws) -> Tensor:
        """What a step learns of the labels (B, …) of its images: all, but for several captions."""
        ...

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """The training loss, fp32: a scalar, or (B,) with ``reduction`` "none".

        Mixed labels (B, K) where they make sense.
        """
        ...

    def among(self, labels: Tensor) -> Self:
        """The task whose attacks compare with all of ``labels`` (N, …), not with those of a batch;
        itself where an item stands for itself.
        """
        ...

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """What an attack makes large, (B,), in the prediction's dtype."""
        ...

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """The loss as it is reported of a test split, (N,) fp64."""
        ...

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """One score an image, (N,): bool where right and wrong is all there is, else fp64."""
        ...

    def top5(self, prediction: Tensor, labels: Tensor) -> Tensor | None:
        """Whether the label is among the five most likely answers, (N,) bool.

        None where that says nothing: for five classes at most, for several labels an image, and
        for real numbers.
        """
        ...

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        """The sum of a training batch's scores, on its device and unchecked.

        Of mixed images the larger share counts. learned: (M,) int64, the images that stand for all
        of the batch; None for each for itself.
        """
        ...

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        """The mean of ``scores``, as a validation split reports it after each epoch."""
        ...

    def interval(self, scores: Tensor, people: np.ndarray | None = None) -> Interval:
        """The mean of scores (N,) with its 95 % interval over images.

        people: (N,), whose image each is; the interval is then over people.
        """
        ...

    def worst(self, one: Tensor, other: Tensor) -> Tensor:
        """Of two scores of each image the worse: what an adversary who may choose leaves."""
        ...

    def difference(
        self,
        one: Tensor,
        other: Tensor,
        level: float = 0.95,
        people: np.ndarray | None = None,
    ) -> Interval:
        """Mean of ``one`` minus that of ``other``, scores (N,) of the same images; its interval."""
        ...

    def guess(self, labels: Tensor) -> float:
        """The mean score of the best answer that does not look at the image."""
        ...

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> Details:
        """What else is reported of a test split (N,); train_labels: all of the training split."""
        ...

    def packed(self, scores: Tensor) -> str | list[float]:
        """Scores (N,) as a result keeps them."""
        ...

    def unpacked(self, kept: str | Sequence[float], images: int) -> Tensor:
        """Scores (N,) of ``packed``."""
        ...

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """(rows, classes), each (M,): an image stands once for each of its labels; None where
        labels are no classes.
        """
        ...

    def counts(self, labels: np.ndarray) -> list[int]:
        """How many images have each class; [] where labels are no classes."""
        ...

    def stored(self, images: int) -> tuple[tuple[int, ...], type]:
        """Shape and dtype of the labels of a split of ``images`` images, as a file holds them."""
        ...

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError, beginning with ``what``, unless labels (N, …) are of this task."""
        ...

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        """Why ``what`` cannot be done with such labels, in words for the user; None where it can.

        what: "label_smoothing", "shots", "mix", "distillation", "decision" (one right class),
        "share" (an image is right or wrong), "classes" (there are any), "one_class" (one an image),
        "confidence" (an answer has a probability).
        """
        ...

"""One number per image, such as an age: labels fp32 (N,), predictions (N, 1), one unit.

Metrics are computed in fp64.
"""

from typing import Literal, TypedDict

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn.functional import l1_loss

from moecore.core.files import UserError
from moecore.tasks.base import ExtraTestMetrics, Reduction, Score, Task

# An error that varies by less than this share of the labels' deviation is rounding, and depends on
# nothing.
LEAST = 1e-9


class Regression(Task):
    """The mean absolute error: learned in deviations of the labels, shown in their unit."""

    kind: Literal["regression"] = "regression"
    target: str = Field(min_length=1, description="what the labels are, such as age")
    unit: str = Field("", description="of the labels, such as years")
    mean: float = Field(0.0, description="of the training labels: what an untrained head says")
    deviation: float = Field(
        1.0, gt=0, description="of the training labels: one unit of the head's output"
    )

    @property
    def outputs(self) -> int:
        return 1

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def score(self) -> Score:
        return Score("mae", "mean absolute error", self.unit, "number", "lower")

    @property
    def head(self) -> tuple[float, float]:
        return self.mean, self.deviation

    def predict(self, output: Tensor) -> Tensor:
        """The target in its unit, fp32: bfloat16 knows an age of 70 only to half a year."""
        return output.float() * self.deviation + self.mean

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """|ŷ − y| / deviation: about 0.8 at the start whatever is predicted in years or days, so
        that learning rates and the weights of other losses keep their meaning (L1: ERMoE, algorithm
        2, line 13; the division is our choice).

        Raises UserError for label smoothing, and for predictions that are not (B, 1).
        """
        if label_smoothing:
            problem = f"label_smoothing: found {label_smoothing}"
            raise UserError(f"{problem}, but {self.needs_classes('label_smoothing')}; allowed: 0")
        if prediction.shape != (len(labels), 1):
            raise UserError(
                f"the model predicts {tuple(prediction.shape)} for {len(labels)} real labels; "
                "needed: one number per image, a model built for a target"
            )
        error = l1_loss(prediction[:, 0].float(), labels.float(), reduction=reduction)
        return error / self.deviation

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """|ŷ − y| of each image in the target's unit, (B,).

        Raises ValueError for predictions of another shape, which would be broadcast.
        """
        if prediction.shape != (len(labels), 1):
            needed = f"one number per image, ({len(labels)}, 1), is needed for real labels"
            raise ValueError(f"attack: predictions are {tuple(prediction.shape)}; {needed}")
        return (prediction[:, 0] - labels.to(prediction.dtype)).abs()

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.attack_loss(prediction.double(), labels)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """|ŷ − y| of each image in the target's unit; (N,) fp64."""
        return absolute_error(prediction, labels)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        errors = (prediction[:, 0].float() - labels).abs()
        if learned is not None:
            errors = errors[learned]
        return errors.mean() * len(labels)

    def baseline_score(self, labels: Tensor) -> float:
        """The mean absolute error of the labels' own median (the mean of the two middle ones)."""
        known = labels.double()
        return float((known - known.quantile(0.5)).abs().mean())

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return what any model must beat."""
        return ExtraTestMetrics(median_mae=median_mae(train_labels, labels))

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images,), np.float32

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless the labels are finite numbers, (N,)."""
        if labels.ndim != 1 or not np.isfinite(labels).all():
            raise UserError(f"{what} are not all numbers")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("distillation", "decision"):
            return "these labels are real numbers, and a decision is a class"
        if what == "share":
            return "a prediction of a real number is never simply right"
        return "these labels are real numbers"


class AgeFit(TypedDict):
    """How predictions ŷ go with labels y (ERMoE, table S1)."""

    mae: float  # mean |ŷ − y|
    corr: float  # correlation of ŷ − y with y; negative where the old are made younger
    slope: float  # b of the least squares ŷ = a + b·y
    intercept: float  # a


def absolute_error(prediction: Tensor, labels: Tensor) -> Tensor:
    """|ŷ − y| of each image; (N,) fp64.

    Raises UserError for shapes that do not fit, for no images and for numbers that are not finite.
    """
    return _signed_errors(prediction, labels).abs()


def mean_absolute_error(prediction: Tensor, labels: Tensor) -> float:
    """Mean absolute error. Raises UserError as ``absolute_error`` does."""
    return float(absolute_error(prediction, labels).mean())


def age_fit(prediction: Tensor, labels: Tensor) -> AgeFit:
    """Mean absolute error, corr(ŷ − y, y), and slope and intercept of the least squares of ŷ on y.

    A constant error has correlation 0. Raises UserError where the labels do not vary (a slope is
    then not defined), and as ``absolute_error`` does. Source: ERMoE, supplement §5.
    """
    errors = _signed_errors(prediction, labels)
    labels = labels.double()
    centred = labels - labels.mean()
    spread = centred.square().sum()
    if len(labels) < 2 or spread <= (LEAST * labels.abs().max()) ** 2:
        problem = f"all {len(labels)} labels are {float(labels[0]):g}"
        raise UserError(f"regression: {problem}; a slope needs labels that differ")
    off = errors - errors.mean()
    excess = float((centred * off).sum() / spread)  # slope of the error on y; of ŷ it is one more
    length = off.square().sum()
    corr = 0.0
    if length > LEAST**2 * spread:
        corr = float((centred * off).sum() / (spread * length).sqrt())
    intercept = float(errors.mean() - excess * labels.mean())
    return AgeFit(mae=float(errors.abs().mean()), corr=corr, slope=1 + excess, intercept=intercept)


def median_mae(train_labels: Tensor, test_labels: Tensor) -> float:
    """The error of always answering with the training labels' median: to be beaten."""
    if len(train_labels) == 0:
        raise UserError("regression: no training labels, so no median")
    median = train_labels.double().quantile(0.5)
    return mean_absolute_error(median.expand(len(test_labels)), test_labels)


def _signed_errors(prediction: Tensor, labels: Tensor) -> Tensor:
    """ŷ − y, (N,) fp64."""
    fits = prediction.shape in (labels.shape, (len(labels), 1))
    if labels.ndim != 1 or not fits or len(labels) == 0:
        problem = f"predictions {tuple(prediction.shape)} and labels {tuple(labels.shape)}"
        needed = "(images, 1) or (images,), and (images,), at least one image"
        raise UserError(f"regression: {problem}; needed: {needed}")
    errors = prediction.double().reshape(-1) - labels.double()
    wrong = (~errors.isfinite()).nonzero()
    if len(wrong):
        problem = "a prediction or a label that is not a finite number"
        raise UserError(f"regression: image {int(wrong[0])} has {problem}")
    return errors

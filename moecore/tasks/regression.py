"""Task with one number per image, such as an age: labels fp32 (N,), predictions (N, 1)."""

from typing import Literal, TypedDict

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn.functional import l1_loss

from moecore.core.files import UserError
from moecore.tasks.base import ExtraTestMetrics, Reduction, Score, Task

MIN_VARIATION = 1e-9  # relative to the labels' deviation; below this an error varies by rounding


class Regression(Task):
    """Predict a number; score: absolute error; loss: absolute error / ``deviation``."""

    kind: Literal["regression"] = "regression"
    target: str = Field(min_length=1, description="what the labels are, such as age")
    unit: str = Field("", description="of the labels, such as years")
    mean: float = Field(0.0, description="of the training labels: prediction of an untrained head")
    deviation: float = Field(1.0, gt=0, description="of training labels: one unit of the output")

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
        """Return the prediction in the target's unit, fp32: bfloat16 would round 70 to ½ unit."""
        return output.float() * self.deviation + self.mean

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return |ŷ − y| / deviation (L1: ERMoE, algorithm 2, line 13)."""
        # The division is our choice: about 0.8 at the start in any unit, so learning rates and the
        # weights of other losses keep their meaning.
        self.refuse_label_smoothing(label_smoothing)
        if prediction.shape != (len(labels), 1):
            raise UserError(
                f"the model predicts {tuple(prediction.shape)} for {len(labels)} real labels; "
                "needed: one number per image, a model built for a target"
            )
        error = l1_loss(prediction[:, 0].float(), labels.float(), reduction=reduction)
        return error / self.deviation

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return |ŷ − y| of each image in the target's unit, (B,)."""
        if prediction.shape != (len(labels), 1):  # it would be broadcast
            raise ValueError(
                f"attack: predictions are {tuple(prediction.shape)}; one number per image, "
                f"({len(labels)}, 1), is needed for real labels"
            )
        return (prediction[:, 0] - labels.to(prediction.dtype)).abs()

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.attack_loss(prediction.double(), labels)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return signed_errors(prediction, labels).abs()

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        errors = (prediction[:, 0].float() - labels).abs()
        return (errors if learned is None else errors[learned]).mean() * len(labels)

    def baseline_score(self, labels: Tensor) -> float:
        """Return the mean absolute error of the labels' median (mean of the two middle ones)."""
        labels = labels.double()
        return float((labels - labels.quantile(0.5)).abs().mean())

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        return ExtraTestMetrics(median_mae=median_predictor_mae(train_labels, labels))

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images,), np.float32

    def check(self, labels: np.ndarray, what: str) -> None:
        if labels.ndim != 1 or not np.isfinite(labels).all():
            raise UserError(f"{what} are not all numbers")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("distillation", "decision"):
            return "these labels are real numbers, and a decision is a class"
        if what == "share":
            return "a prediction of a real number is never simply right"
        return "these labels are real numbers"


class AgeBias(TypedDict):
    """Error and linear fit of predicted ages ŷ against ages y (ERMoE, table S1)."""

    mae: float  # mean |ŷ − y|
    corr: float  # correlation of ŷ − y with y; negative if the old are predicted too young
    slope: float  # b of the least squares ŷ = a + b·y
    intercept: float  # a


def measure_age_bias(prediction: Tensor, labels: Tensor) -> AgeBias:
    """Return the MAE, corr(ŷ − y, y), and slope and intercept of the regression of ŷ on y."""
    # A constant error has correlation 0. Source: ERMoE, supplement §5.
    errors = signed_errors(prediction, labels)
    labels = labels.double()
    centred = labels - labels.mean()
    spread = centred.square().sum()
    if len(labels) < 2 or spread <= (MIN_VARIATION * labels.abs().max()) ** 2:
        raise UserError(
            f"regression: all {len(labels)} labels are {float(labels[0]):g}; a slope needs labels "
            "that differ"
        )
    centred_errors = errors - errors.mean()
    covariation = (centred * centred_errors).sum()
    excess = float(covariation / spread)  # slope of the error on y; the slope of ŷ is 1 + excess
    error_spread = centred_errors.square().sum()
    corr = 0.0
    if error_spread > MIN_VARIATION**2 * spread:
        corr = float(covariation / (spread * error_spread).sqrt())
    intercept = float(errors.mean() - excess * labels.mean())
    return AgeBias(mae=float(errors.abs().mean()), corr=corr, slope=1 + excess, intercept=intercept)


def median_predictor_mae(train_labels: Tensor, test_labels: Tensor) -> float:
    if len(train_labels) == 0:
        raise UserError("regression: no training labels, so no median")
    median = train_labels.double().quantile(0.5)
    return float(signed_errors(median.expand(len(test_labels)), test_labels).abs().mean())


def signed_errors(prediction: Tensor, labels: Tensor) -> Tensor:
    """Return ŷ − y, (N,) fp64; UserError for wrong shapes, no images, or non-finite numbers."""
    fits = prediction.shape in (labels.shape, (len(labels), 1))
    if labels.ndim != 1 or not fits or len(labels) == 0:
        raise UserError(
            f"regression: predictions {tuple(prediction.shape)} and labels {tuple(labels.shape)}; "
            "needed: (images, 1) or (images,), and (images,), at least one image"
        )
    errors = prediction.double().reshape(-1) - labels.double()
    invalid = (~errors.isfinite()).nonzero()
    if len(invalid):
        raise UserError(f"regression: image {int(invalid[0])} has a non-finite prediction or label")
    return errors

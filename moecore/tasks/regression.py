"""One number per image, such as an age: labels fp32 (N,), predictions (N, 1), one unit."""

from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn.functional import l1_loss

from moecore.core.files import UserError
from moecore.tasks.base import ExtraTestMetrics, Reduction, Score, Task
from moecore.tasks.regression import absolute_error, median_mae


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

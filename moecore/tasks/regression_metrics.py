"""Metrics of predictions of a real number, such as an age; all arithmetic is in fp64.

prediction: (N, 1) or (N,), in the target's unit; labels: (N,) floating point, in that unit too.
"""

from typing import TypedDict

from torch import Tensor

from moecore.core.files import UserError

# An error that varies by less than this share of the labels' deviation is rounding, and depends on
# nothing.
LEAST = 1e-9


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

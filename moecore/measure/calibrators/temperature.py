"""Temperature scaling (Guo et al. 2017): one scalar, fitted on validation, divides all logits."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar, Literal

import scipy
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.measure.calibrators.base import Calibrator, FittedCalibrator

MIN_TEMPERATURE = 0.05  # reached if every validation image is right
MAX_TEMPERATURE = 20.0  # reached if logits carry no information about labels


class FittedTemperature(FittedCalibrator):
    """A fitted temperature: the number that divides all logits."""

    kind: Literal["temperature"] = "temperature"
    temperature: float = Field(gt=0, allow_inf_nan=False, description="Divisor of the logits.")
    at_limit: bool = Field(False, description="Whether the best temperature is beyond a limit.")

    def apply(self, predictions: Tensor, groups: Sequence[str] | None = None) -> Tensor:
        return predictions / self.temperature

    @property
    def summary(self) -> str:
        return f"temperature {self.temperature:.4g}"


class Temperature(Calibrator):
    """Fits one temperature by the negative log-likelihood."""

    predicts: ClassVar[Literal["classes"]] = "classes"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "cells", "next_token")
    fitted: ClassVar[type[FittedCalibrator]] = FittedTemperature

    kind: Literal["temperature"] = "temperature"

    def fit(
        self, predictions: Tensor, labels: Tensor, groups: Sequence[str] | None = None
    ) -> FittedTemperature:
        """Return the temperature with the smallest NLL of logits (N, K); groups have no effect."""
        _check_logits(predictions, labels)
        logits = predictions.detach().double().cpu()
        labels = labels.long().cpu()
        return self.fit_by_derivative(
            lambda beta: float(nll_derivative_by_row(logits, labels, beta).mean())
        )

    def fit_by_derivative(
        self, slope_at: Callable[[float], float], tolerance: float = 1e-12
    ) -> FittedTemperature:
        """Return the temperature with the smallest NLL from its slope dNLL/dβ at β = 1/T."""
        # For predictions that do not fit in memory. tolerance: relative, of β.
        slope_at = cache(slope_at)
        low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
        # The NLL is convex in β.
        if slope_at(low) >= 0:
            return FittedTemperature(temperature=MAX_TEMPERATURE, at_limit=True)
        if slope_at(high) <= 0:
            return FittedTemperature(temperature=MIN_TEMPERATURE, at_limit=True)
        beta = scipy.optimize.root_scalar(slope_at, bracket=(low, high), rtol=tolerance).root
        return FittedTemperature(temperature=1 / beta)


def _check_logits(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[0] == 0 or labels.shape != logits.shape[:1]:
        raise UserError(
            f"calibrate: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} of the "
            "validation split; (N, K) and (N,) with N ≥ 1 are needed"
        )
    if not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits)).any(dim=1).sum())
        raise UserError(
            f"calibrate: {bad} of {len(logits)} validation images have NaN or infinite logits; the "
            "model is damaged, train it again"
        )
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise UserError(
            f"calibrate: labels go from {int(labels.min())} to {int(labels.max())}; the model has "
            f"the classes 0 to {logits.shape[1] - 1}"
        )
    if labels.min() == labels.max():
        raise UserError(
            f"calibrate: all {len(labels)} validation labels are of class {int(labels[0])}; a "
            "temperature needs two classes or more"
        )


def nll_derivative_by_row(logits: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Return dNLL/dβ = z̄ − z_label per row z of logits (N, K); z̄: mean of z under softmax(βz)."""
    mean = (torch.softmax(beta * logits, dim=1) * logits).sum(dim=1)
    return mean - logits.gather(1, labels[:, None])[:, 0]

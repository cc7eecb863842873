"""Linear correction of a predicted age: fits ŷ = a + b·y, and returns (ŷ − a)/b.

A network trained to predict age is biased towards the mean age: b < 1, so young brains look older
and old brains younger. The correction removes this bias. The fit needs ages; its use does not.

N predictions, in the target's unit (years). Sources: Cole et al. (2018); Smith et al. (2019); de
Lange & Cole (2020), who compare it with Beheshti et al. (2019), here ``gap_on_age``.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from moecore.core.config import Config
from moecore.measure.calibrators.base import POOLED, Calibrator, FitOn, FittedCalibrator
from moecore.measure.calibrators.fit_by_group import (
    NoFitError,
    check_ages_vary,
    check_finite,
    fit_by_group,
    fit_of_each,
)


class FittedLine(Config):
    """ŷ = intercept + slope · y, fitted to n pairs."""

    intercept: float = Field(
        allow_inf_nan=False, description="a of ŷ = a + b·y, in the target's unit."
    )
    slope: float = Field(
        allow_inf_nan=False, description="b of ŷ = a + b·y; 1 needs no correction."
    )
    n: int = Field(ge=3, description="Number of pairs that it was fitted to.")

    @field_validator("slope")
    @classmethod
    def _invertible(cls, slope: float) -> float:
        if slope == 0:
            raise ValueError("a slope of 0 cannot be inverted")
        return slope

    def invert(self, predictions: np.ndarray) -> np.ndarray:
        """Return (ŷ − a)/b, (N,) to (N,)."""
        return (predictions - self.intercept) / self.slope


class FittedLinear(FittedCalibrator):
    """The fitted lines: one for all pairs, and one for each group that allows a fit."""

    kind: Literal["linear"] = "linear"
    fit_on: FitOn = Field(description="Split whose predictions it was fitted to.")
    pooled: FittedLine = Field(
        description="The line of all pairs; also used for groups without a line."
    )
    groups: dict[str, FittedLine] = Field(description="Lines by group (sex).")
    fallbacks: dict[str, str] = Field({}, description="Groups without a line → the reason.")

    def apply(self, predictions: np.ndarray, groups: Sequence[str] | None = None) -> np.ndarray:
        """Return (ŷ − a)/b by the group's line, or the pooled one, with a warning.

        Args:
            predictions: ŷ, (N,).
            groups: Group of each prediction, (N,); None: the pooled line for all.

        Returns:
            Corrected ages, (N,) fp64.

        Raises:
            UserError: numbers of groups and predictions differ, or predictions are not finite.
        """
        predictions = check_finite("predictions", predictions)
        if groups is None:
            return self.pooled.invert(predictions)
        lines = fit_of_each(self.groups, self.pooled, groups, len(predictions))
        inverted = [line.invert(value) for line, value in zip(lines, predictions, strict=True)]
        return np.array(inverted, np.float64)

    def used(self, groups: Sequence[str]) -> list[str]:
        """Return the line that corrects each prediction: its group, or ``pooled``."""
        return [group if group in self.groups else POOLED for group in groups]


class Linear(Calibrator):
    """Fits ŷ = a + b·y by least squares, for all and for each sex; for real labels."""

    predicts: ClassVar[Literal["numbers"]] = "numbers"
    tasks: ClassVar[tuple[str, ...]] = ("regression",)
    fitted: ClassVar[type[FittedCalibrator]] = FittedLinear

    kind: Literal["linear"] = "linear"
    fit_on: FitOn = Field(
        "train", description="out_of_fold: training images, predicted by models of other folds."
    )
    min_slope: float = Field(
        0.1, gt=0, lt=1, description="Smallest |b| allowed, as errors are divided by it."
    )

    @property
    def split(self) -> FitOn:
        """Return the split whose predictions it is fitted to."""
        return self.fit_on

    def fit(
        self, predictions: np.ndarray, labels: np.ndarray, groups: Sequence[str] | None = None
    ) -> FittedLinear:
        """Fit the lines of ``predictions`` on ``labels``.

        Args:
            predictions: ŷ, (N,), in the target's unit.
            labels: Ages, (N,).
            groups: Group of each pair, (N,), "" if unknown; None: no groups. A group without a line
                (too few pairs, one age, a small slope) uses the pooled line, with a warning.

        Returns:
            The fitted lines.

        Raises:
            UserError: shapes differ, n < 3, values are not finite, targets are equal, or the pooled
                |b| is below ``min_slope``.
        """
        name = f"linear, fitted on {self.fit_on}"
        fits = fit_by_group(predictions, labels, groups, self._fit_line, name)
        return FittedLinear(fit_on=self.fit_on, **fits._asdict())

    def _fit_line(self, predictions: np.ndarray, targets: np.ndarray) -> FittedLine:
        check_ages_vary(targets, 3)
        line = _least_squares(predictions, targets) if np.ptp(predictions) else None
        slope = line.slope if line else 0.0
        if line is None or abs(slope) < self.min_slope:
            raise NoFitError(
                f"found a slope of {slope:.4g}; allowed: |slope| ≥ min_slope = {self.min_slope:g} "
                "(predictions depend little on age; train longer)"
            )
        return line


def _least_squares(predictions: np.ndarray, targets: np.ndarray) -> FittedLine:
    """Return the least-squares line of ŷ on y."""
    # Around the means, which avoids cancellation if ages are far from 0.
    centre = targets - targets.mean()
    slope = float(centre @ (predictions - predictions.mean()) / (centre @ centre))
    return FittedLine(
        intercept=float(predictions.mean() - slope * targets.mean()), slope=slope, n=len(targets)
    )

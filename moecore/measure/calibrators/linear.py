"""Linear correction of a predicted age: ŷ = a + b·y is fitted, and (ŷ − a)/b is what is reported.

A network that is trained to predict an age leans towards the mean age: b < 1, so young brains look
older and old ones younger. The correction takes that out. The line is fitted where the ages are
known; the fitted object takes none, so a new brain needs no age.

N predictions, in the target's unit (years). Sources: Cole et al. (2018); Smith et al. (2019); de
Lange & Cole (2020), who compare it with that of Beheshti et al. (2019), which is ``gap_on_age``.
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
        allow_inf_nan=False, description="b of ŷ = a + b·y; 1 would need no correction."
    )
    n: int = Field(ge=3, description="Pairs that it was fitted to.")

    @field_validator("slope")
    @classmethod
    def _invertible(cls, slope: float) -> float:
        if slope == 0:
            raise ValueError("a slope of 0 cannot be inverted")
        return slope

    def invert(self, predictions: np.ndarray) -> np.ndarray:
        """(ŷ − a)/b, (N,) to (N,)."""
        return (predictions - self.intercept) / self.slope


class FittedLinear(FittedCalibrator):
    """The fitted lines: one for all, and one for each group that had enough."""

    kind: Literal["linear"] = "linear"
    fit_on: FitOn = Field(description="Split whose predictions it was fitted to.")
    pooled: FittedLine = Field(
        description="The line of all pairs; for groups without one of their own, too."
    )
    groups: dict[str, FittedLine] = Field(description="Lines by group (sex).")
    fallbacks: dict[str, str] = Field(
        {}, description="Groups of the fit that got no line of their own → why."
    )

    def apply(self, predictions: np.ndarray, groups: Sequence[str] | None = None) -> np.ndarray:
        """Corrected predictions, (N,) to (N,) fp64: each by its group's line.

        Where there is none by the pooled one, with a warning. groups: one name for each prediction;
        None: the pooled line for all. There is no age among the arguments. Raises UserError for
        another number of groups than of predictions, and for NaN or infinite predictions.
        """
        predictions = check_finite("predictions", predictions)
        if groups is None:
            return self.pooled.invert(predictions)
        lines = fit_of_each(self.groups, self.pooled, groups, len(predictions))
        inverted = [line.invert(value) for line, value in zip(lines, predictions, strict=True)]
        return np.array(inverted, np.float64)

    def used(self, groups: Sequence[str]) -> list[str]:
        """Whose line corrects each prediction: the group's, or ``pooled`` where it has none."""
        return [group if group in self.groups else POOLED for group in groups]


class Linear(Calibrator):
    """Fits ŷ = a + b·y by least squares, for all and for each sex; for real labels."""

    predicts: ClassVar[Literal["numbers"]] = "numbers"
    tasks: ClassVar[tuple[str, ...]] = ("regression",)
    fitted: ClassVar[type[FittedCalibrator]] = FittedLinear

    kind: Literal["linear"] = "linear"
    fit_on: FitOn = Field(
        "train", description="out_of_fold: training images, each seen by other models than its own."
    )
    min_slope: float = Field(
        0.1, gt=0, lt=1, description="Floor of |b|, by which errors are divided; below: refused."
    )

    @property
    def split(self) -> FitOn:
        """Return whose predictions it is fitted to."""
        return self.fit_on

    def fit(
        self, predictions: np.ndarray, labels: np.ndarray, groups: Sequence[str] | None = None
    ) -> FittedLinear:
        """The lines of ``predictions`` (N,) on ``labels`` (N,), both in the target's unit.

        groups: (N,) names, "" is unknown; None: of all. A group whose own line is refused (too few
        pairs, one age, a slope below the floor) falls back to the pooled line, with a warning.
        Raises UserError for shapes that differ, n < 3, NaN or infinite values, equal targets, and a
        pooled |b| below ``min_slope``.
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
                "(predictions hardly follow age; train longer)"
            )
        return line


def _least_squares(predictions: np.ndarray, targets: np.ndarray) -> FittedLine:
    """Least squares of ŷ on y."""
    # Around the means, which keeps the digits where ages are far from 0.
    centre = targets - targets.mean()
    slope = float(centre @ (predictions - predictions.mean()) / (centre @ centre))
    return FittedLine(
        intercept=float(predictions.mean() - slope * targets.mean()), slope=slope, n=len(targets)
    )

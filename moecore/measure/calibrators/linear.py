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
from moecore.measure.calibrators import base


class FittedLine(Config):
    """ŷ = intercept + slope · y, fitted to n pairs."""

    intercept: float = Field(allow_inf_nan=False, description="a of ŷ = a + b·y, in target units.")
    slope: float = Field(allow_inf_nan=False, description="b of ŷ = a + b·y; 1: no correction.")
    n: int = Field(ge=3, description="Number of pairs that it was fitted to.")

    @field_validator("slope")
    @classmethod
    def _invertible(cls, slope: float) -> float:
        if slope == 0:
            raise ValueError("a slope of 0 cannot be inverted")
        return slope

    def invert(self, predictions: np.ndarray) -> np.ndarray:
        return (predictions - self.intercept) / self.slope


class FittedLinesByGroup(base.FittedByGroupBase):
    """The fitted lines: one for all pairs, and one for each group that allows a fit."""

    kind: Literal["linear"] = "linear"
    pooled: FittedLine = Field(description="The line of all pairs, and of groups without a line.")
    groups: dict[str, FittedLine] = Field(description="Lines by group (sex).")
    fallbacks: dict[str, str] = Field({}, description="Groups without a line → the reason.")

    def apply(self, predictions: np.ndarray, groups: Sequence[str] | None = None) -> np.ndarray:
        """Return (ŷ − a)/b by the group's line, or the pooled one, with a warning."""
        predictions = base.convert_to_finite_vector("predictions", predictions)
        if groups is None:
            return self.pooled.invert(predictions)
        lines = base.select_fits(self.groups, self.pooled, groups, len(predictions))
        inverted = [line.invert(value) for line, value in zip(lines, predictions, strict=True)]
        return np.array(inverted, np.float64)


class Linear(base.NumberCalibrator):
    """Corrects an age ŷ to (ŷ − a)/b; ŷ = a + b·y fitted by least squares, pooled and per sex."""

    fitted: ClassVar[type[base.FittedCalibrator]] = FittedLinesByGroup

    kind: Literal["linear"] = "linear"
    min_slope: float = Field(0.1, gt=0, lt=1, description="Smallest |b|: errors are divided by b.")

    def fit_pairs(self, predictions: np.ndarray, ages: np.ndarray) -> FittedLine:
        """Return a and b of ŷ = a + b·y; NoFitError for n < 3, equal ages, or a small |b|."""
        base.check_ages_allow_fit(ages, 3)
        slope = 0.0
        if np.ptp(predictions):
            # Around the means, which avoids cancellation if ages are far from 0.
            centre = ages - ages.mean()
            slope = float(centre @ (predictions - predictions.mean()) / (centre @ centre))
        if abs(slope) < self.min_slope:
            raise base.NoFitError(
                f"found a slope of {slope:.4g}; allowed: |slope| ≥ min_slope = {self.min_slope:g} "
                "(predictions depend little on age; train longer)"
            )
        intercept = float(predictions.mean() - slope * ages.mean())
        return FittedLine(intercept=intercept, slope=slope, n=len(ages))

"""Correction of the gap by the known age: fits ŷ − y = g(y), and returns ŷ − g(y).

g is a line (Beheshti et al. 2019) or a parabola (Smith et al. 2019), for all and for each sex. As g
needs the true age, the result corrects the gap of people with known age, and is not a prediction of
age. The error of ŷ − g(y) does not measure a model, because it contains y (Butler et al. 2021): a
model that always answers 60 would have an error of 0. With a line of slope b the gap is b times the
gap of ``linear`` (de Lange & Cole 2020).
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.polynomial import Polynomial
from pydantic import Field

from moecore.core import config, files
from moecore.measure.calibrators import base


class FittedGap(config.Config):
    """The gap ŷ − y (prediction − age) expected at age y: a polynomial fitted to n pairs."""

    coefficients: tuple[float, ...] = Field(
        min_length=2, description="Of age⁰, age¹ and, for a parabola, age², in the target's unit."
    )
    n: int = Field(ge=3, description="Number of pairs that it was fitted to.")

    def expected_gap(self, ages: np.ndarray) -> np.ndarray:
        return Polynomial(self.coefficients)(ages)


class FittedGapOnAge(base.FittedByGroupBase):
    """The fitted curves: one for all pairs, and one for each group that allows a fit."""

    uses_age: ClassVar[bool] = True

    kind: Literal["gap_on_age"] = "gap_on_age"
    pooled: FittedGap = Field(description="The curve of all pairs, and of groups without a curve.")
    groups: dict[str, FittedGap] = Field(description="Curves by group (sex).")
    fallbacks: dict[str, str] = Field({}, description="Groups without a curve → the reason.")

    def apply(
        self,
        predictions: np.ndarray,
        groups: Sequence[str] | None = None,
        ages: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return ŷ − g(y), (N,) fp64; g: gap expected at age y, of the group or else pooled."""
        if ages is None:
            raise files.UserError(
                "calibrate.calibrator: gap_on_age corrects by the known age, which is missing; "
                "allowed: ages of all volumes, or kind: linear, which needs none"
            )
        predictions = base.convert_to_finite_vector("predictions", predictions)
        ages = base.convert_to_finite_vector("ages", ages)
        if groups is None:
            return predictions - self.pooled.expected_gap(ages)
        curves = base.select_fits(self.groups, self.pooled, groups, len(predictions))
        gaps = [curve.expected_gap(age) for curve, age in zip(curves, ages, strict=True)]
        return predictions - np.array(gaps, np.float64)


class GapOnAge(base.NumberCalibrator):
    """Subtracts the gap ŷ − y expected at age y, fitted by least squares, pooled and per sex."""

    fitted: ClassVar[type[base.FittedCalibrator]] = FittedGapOnAge

    kind: Literal["gap_on_age"] = "gap_on_age"
    degree: Literal[1, 2] = Field(1, description="1: a line in age; 2: a parabola.")

    def fit_pairs(self, predictions: np.ndarray, ages: np.ndarray) -> FittedGap:
        """Return the gap ŷ − y as a polynomial of age y; NoFitError for too few pairs or ages."""
        base.check_ages_allow_fit(ages, self.degree + 2)
        if (different := len(np.unique(ages))) <= self.degree:
            raise base.NoFitError(f"found {different} ages; allowed: {self.degree + 1} or more")
        curve = Polynomial.fit(ages, predictions - ages, self.degree).convert()
        coefficients = np.zeros(self.degree + 1)
        coefficients[: len(curve.coef)] = curve.coef  # ``convert`` drops trailing zeros
        return FittedGap(coefficients=tuple(coefficients.tolist()), n=len(ages))

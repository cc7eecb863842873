"""Correction of the gap by the known age: ŷ − y = g(y) is fitted, and ŷ − g(y) is what is reported.

g is a line (Beheshti et al. 2019) or a parabola (Smith et al. 2019), for all and for each sex. It
needs the age that a prediction is for: so it corrects the gap of people whose age is known, and
predicts no age. The error of ŷ − g(y) says nothing of a model, for y stands in it (Butler et al.
2021): a model that always answers 60 would have one of 0. With a line of slope b the gap is b times
that of ``linear`` (de Lange & Cole 2020).

N predictions, in the target's unit (years).
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.polynomial import Polynomial
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.measure.calibrators.base import POOLED, Calibrator, FitOn, FittedCalibrator
from moecore.measure.calibrators.fit_by_group import (
    NoFitError,
    check_ages_vary,
    check_finite,
    fit_by_group,
    fit_of_each,
)


class FittedGap(Config):
    """The gap that is expected at an age, a polynomial of it, fitted to n pairs."""

    coefficients: tuple[float, ...] = Field(
        min_length=2, description="Of age⁰, age¹ and, of a parabola, age², in the target's unit."
    )
    n: int = Field(ge=3, description="Pairs that it was fitted to.")

    def expected_gap(self, ages: np.ndarray) -> np.ndarray:
        """g(y), (N,) to (N,)."""
        return Polynomial(self.coefficients)(ages)


class FittedGapOnAge(FittedCalibrator):
    """The fitted curves: one for all, and one for each group that had enough."""

    uses_age: ClassVar[bool] = True

    kind: Literal["gap_on_age"] = "gap_on_age"
    fit_on: FitOn = Field(description="Split whose predictions it was fitted to.")
    pooled: FittedGap = Field(
        description="The curve of all pairs; for groups without one of their own, too."
    )
    groups: dict[str, FittedGap] = Field(description="Curves by group (sex).")
    fallbacks: dict[str, str] = Field(
        {}, description="Groups of the fit that got no curve of their own → why."
    )

    def apply(
        self,
        predictions: np.ndarray,
        groups: Sequence[str] | None = None,
        ages: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return ŷ − g(y), (N,) fp64, each by its group's curve, else by the pooled one.

        ages: (N,), known; UserError without them, or where one is NaN.
        """
        if ages is None:
            raise UserError(
                "calibrate.calibrator: gap_on_age corrects by the known age, and there is none; "
                "allowed: ages of all volumes, or kind: linear, which takes none"
            )
        predictions = check_finite("predictions", predictions)
        known = check_finite("ages", ages)
        if groups is None:
            return predictions - self.pooled.expected_gap(known)
        curves = fit_of_each(self.groups, self.pooled, groups, len(predictions))
        gaps = [curve.expected_gap(age) for curve, age in zip(curves, known, strict=True)]
        return predictions - np.array(gaps, np.float64)

    def used(self, groups: Sequence[str]) -> list[str]:
        """Whose curve corrects each prediction: the group's, or ``pooled`` where it has none."""
        return [group if group in self.groups else POOLED for group in groups]


class GapOnAge(Calibrator):
    """Fits the gap ŷ − y on age by least squares, for all and for each sex; for real labels."""

    predicts: ClassVar[Literal["numbers"]] = "numbers"
    tasks: ClassVar[tuple[str, ...]] = ("regression",)
    fitted: ClassVar[type[FittedCalibrator]] = FittedGapOnAge

    kind: Literal["gap_on_age"] = "gap_on_age"
    degree: Literal[1, 2] = Field(1, description="1: a line in age; 2: a parabola.")
    fit_on: FitOn = Field(
        "train", description="out_of_fold: training images, each seen by other models than its own."
    )

    @property
    def split(self) -> FitOn:
        """Return whose predictions it is fitted to."""
        return self.fit_on

    def fit(
        self, predictions: np.ndarray, labels: np.ndarray, groups: Sequence[str] | None = None
    ) -> FittedGapOnAge:
        """The curves of ``predictions`` (N,) − ``labels`` (N,) on ``labels``.

        groups: (N,) names, "" is unknown; None: of all. A group with too few pairs or ages falls
        back to the pooled curve, with a warning. Raises UserError for shapes that differ, NaN or
        infinite values, and where the pairs of all do not suffice.
        """
        name = f"gap_on_age, fitted on {self.fit_on}"
        fits = fit_by_group(predictions, labels, groups, self._fit_curve, name)
        return FittedGapOnAge(fit_on=self.fit_on, **fits._asdict())

    def _fit_curve(self, predictions: np.ndarray, ages: np.ndarray) -> FittedGap:
        check_ages_vary(ages, self.degree + 2)
        if (different := len(np.unique(ages))) <= self.degree:
            raise NoFitError(
                f"found {different} different ages; allowed: {self.degree + 1} or more"
            )
        curve = Polynomial.fit(ages, predictions - ages, self.degree).convert()
        coefficients = np.zeros(self.degree + 1)
        coefficients[: len(curve.coef)] = curve.coef  # ``convert`` drops zeros at the end
        return FittedGap(coefficients=tuple(coefficients.tolist()), n=len(ages))

"""Linear correction of a predicted age: ŷ = a + b·y is fitted, and (ŷ − a)/b is what is reported.

A network that is trained to predict an age leans towards the mean age: b < 1, so young brains look
older and old ones younger. The correction takes that out. The line is fitted where the ages are
known; the fitted object takes none, so a new brain needs no age.

N predictions, in the target's unit (years). Sources: Smith et al. (2019); de Lange & Cole (2020).
"""

import warnings
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.measure.calibrators.base import POOLED, Calibrator, FitOn, FittedCalibrator


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
        predictions = _check_finite("predictions", predictions)
        if groups is None:
            return self.pooled.invert(predictions)
        if len(groups) != len(predictions):
            raise UserError(
                f"calibrate: {len(groups)} groups for {len(predictions)} predictions; allowed: one "
                "group for each prediction"
            )
        if strange := sorted({group for group in groups if group not in self.groups}):
            named = ", ".join(map(repr, strange))
            warnings.warn(
                f"calibrate: no line of their own for {named}; the pooled line stands in",
                stacklevel=2,
            )
        lines = [self.groups.get(group, self.pooled) for group in groups]
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
        predictions = _check_finite("predictions", predictions)
        targets = _check_finite("ages", labels)
        groups = [""] * len(targets) if groups is None else groups
        if not len(predictions) == len(targets) == len(groups):
            counts = f"{len(predictions)} predictions, {len(targets)} ages, {len(groups)} groups"
            raise UserError(
                f"calibrate: {counts} of the split {self.fit_on}; allowed: as many of each"
            )
        pooled = self._fit_line(predictions, targets)
        lines = {}
        fallbacks = {}
        for name in sorted({group for group in groups if group}):
            members = np.array(groups, dtype=object) == name
            if reason := self._why_not_fitted(predictions[members], targets[members]):
                fallbacks[name] = reason
                warnings.warn(
                    f"calibrate: the group {name!r} gets the pooled line: {reason}", stacklevel=2
                )
            else:
                lines[name] = _least_squares(predictions[members], targets[members])
        return FittedLinear(
            fit_on=self.fit_on,
            pooled=pooled,
            groups=lines,
            fallbacks=fallbacks,
        )

    def _fit_line(self, predictions: np.ndarray, targets: np.ndarray) -> FittedLine:
        if reason := self._why_not_fitted(predictions, targets):
            raise UserError(f"calibrate.calibrator (linear, fitted on {self.fit_on}): {reason}")
        return _least_squares(predictions, targets)

    def _why_not_fitted(self, predictions: np.ndarray, targets: np.ndarray) -> str:
        """Why no line can be fitted to these pairs; "" where one can."""
        if len(targets) < 3:
            return f"found {len(targets)} pairs; allowed: 3 or more"
        if targets.max() == targets.min():
            return (
                f"all {len(targets)} ages are {targets[0]:g}; allowed: two different ages or more"
            )
        if np.ptp(predictions):
            slope = _least_squares(predictions, targets).slope
        else:
            slope = 0.0
        if abs(slope) < self.min_slope:
            return (
                f"found a slope of {slope:.4g}; allowed: |slope| ≥ min_slope = {self.min_slope:g} "
                "(predictions hardly follow age; train longer)"
            )
        return ""


def _check_finite(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise UserError(f"calibrate: {name} of shape {values.shape}; allowed: (N,)")
    if bad := int((~np.isfinite(values)).sum()):
        raise UserError(
            f"calibrate: {bad} of {len(values)} {name} are NaN or infinite; allowed: finite numbers"
        )
    return values


def _least_squares(predictions: np.ndarray, targets: np.ndarray) -> FittedLine:
    """Least squares of ŷ on y."""
    # Around the means, which keeps the digits where ages are far from 0.
    centre = targets - targets.mean()
    slope = float(centre @ (predictions - predictions.mean()) / (centre @ centre))
    return FittedLine(
        intercept=float(predictions.mean() - slope * targets.mean()), slope=slope, n=len(targets)
    )

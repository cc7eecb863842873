"""Base classes of calibrators and of fitted calibrators, and fits per group (sex)."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from moecore.core.config import Config, Part, find_class, read_json_settings
from moecore.core.files import UserError, read_json

FitOn = Literal["train", "validation", "out_of_fold"]
POOLED = "pooled"


class FittedCalibrator(Config, ABC):
    """A fitted calibrator, as calibrator.json stores it; ``kind`` is the calibrator's."""

    uses_age: ClassVar[bool] = False  # whether ``apply`` also takes the known ages

    kind: Any
    predictor_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="Of model.safetensors; set by stage."
    )

    @abstractmethod
    def apply(self, predictions: Any, groups: Sequence[str] | None = None) -> Any:
        """Return calibrated predictions.

        A calibrator that ``uses_age`` takes ``ages`` (N,) as a third argument. Its result serves to
        compute the difference from the age, and is not a prediction of the age.

        Args:
            predictions: Logits (N, K) of classes, or numbers (N,) fp64.
            groups: Group (sex) of each number, (N,); None: no groups.

        Returns:
            Calibrated predictions of the same type and shape; of classes logits, too.
        """

    def used(self, groups: Sequence[str]) -> list[str]:
        """Return the name of the fit that calibrates each prediction: its group, or "pooled"."""
        return [POOLED] * len(groups)

    @property
    def summary(self) -> str:
        """Return the fit in a few words, such as "temperature 1.3"."""
        return str(self.kind)


class Calibrator(Part, ABC):
    """Base of calibrators, which are fitted on a split and then correct a model's predictions.

    params.yaml selects one by ``kind``. A calibrator of next words must subclass Temperature.
    """

    predicts: ClassVar[Literal["classes", "numbers"]]  # its input: logits (N, K), or numbers (N,)
    tasks: ClassVar[tuple[str, ...]]  # kinds of tasks whose predictions it calibrates
    fitted: ClassVar[type[FittedCalibrator]]  # what ``fit`` returns

    @property
    def split(self) -> FitOn:
        """Return the split whose predictions the calibrator is fitted to."""
        return "validation"

    @abstractmethod
    def fit(
        self, predictions: Any, labels: Any, groups: Sequence[str] | None = None
    ) -> FittedCalibrator:
        """Fit the calibrator to predictions and labels of ``split``.

        Args:
            predictions: Logits (N, K), or numbers (N,) fp64.
            labels: Classes int64 (N,), or numbers (N,).
            groups: Group of each number, (N,), "" if unknown; None: no groups.

        Returns:
            The fitted calibrator.

        Raises:
            UserError: the predictions allow no fit.
        """


def read_calibrator(path: Path, predicts: Literal["classes", "numbers"]) -> FittedCalibrator:
    """Read a fitted calibrator from a file; UserError if it does not calibrate ``predicts``."""
    content = read_json(path)
    kind = str(content.get("kind")) if isinstance(content, dict) else ""
    try:
        part = find_class(Calibrator, kind)
    except KeyError:
        raise UserError(f"{path}: found no fitted calibrator of this version") from None
    except ValueError as error:
        raise UserError(f"{path}: kind: {error}") from None
    if part.predicts != predicts:
        other = f"{kind}, which calibrates {part.predicts}"
        raise UserError.at(path, found=other, allowed=f"a calibrator of {predicts}")
    return read_json_settings(path, part.fitted, "a fitted calibrator")


Fit = TypeVar("Fit")


class FittedByGroupBase(FittedCalibrator, ABC):
    """Base of fitted number calibrators: a pooled fit, and a fit of each group that allows one."""

    fit_on: FitOn = Field(description="Split whose predictions it was fitted to.")
    pooled: Any
    groups: dict[str, Any]
    fallbacks: dict[str, str]  # group without a fit → the reason

    def used(self, groups: Sequence[str]) -> list[str]:
        return [group if group in self.groups else POOLED for group in groups]


class NumberCalibrator(Calibrator, ABC):
    """A calibrator of ages, fitted to predictions of training images."""

    predicts: ClassVar[Literal["numbers"]] = "numbers"
    tasks: ClassVar[tuple[str, ...]] = ("regression",)

    fit_on: FitOn = Field("train", description="out_of_fold: training images, other folds' models.")

    @property
    def split(self) -> FitOn:
        return self.fit_on

    @abstractmethod
    def fit_pairs(self, predictions: np.ndarray, ages: np.ndarray) -> Any:
        """Fit pairs of predictions (N,) and ages (N,); raise NoFitError if they allow no fit."""

    def fit(
        self, predictions: np.ndarray, labels: np.ndarray, groups: Sequence[str] | None = None
    ) -> FittedCalibrator:
        # A group whose pairs allow no fit uses the pooled one, with a warning.
        name = f"{self.class_kind()}, fitted on {self.fit_on}"
        fits = fit_by_group(predictions, labels, groups, self.fit_pairs, name)
        return self.fitted.model_validate({"fit_on": self.fit_on, **fits})


class NoFitError(ValueError):
    """Raised if pairs of numbers allow no fit; the message is shown to the user."""


def fit_by_group(
    predictions: Any,
    labels: Any,
    groups: Sequence[str] | None,  # "": no group
    fit: Callable[[np.ndarray, np.ndarray], Fit],  # of (N,), (N,); may raise NoFitError
    name: str,  # for messages, as "linear, fitted on train"
) -> dict[str, Any]:
    """Return the fields of ``FittedByGroupBase``: ``pooled``, ``groups`` and ``fallbacks``."""
    # A group without a fit uses the fit of all, with a warning.
    predictions = convert_to_finite_vector("predictions", predictions)
    targets = convert_to_finite_vector("ages", labels)
    groups = [""] * len(targets) if groups is None else groups
    if not len(predictions) == len(targets) == len(groups):
        counts = f"{len(predictions)} predictions, {len(targets)} ages, {len(groups)} groups"
        raise UserError(f"calibrate.calibrator ({name}): {counts}; allowed: as many of each")
    try:
        pooled = fit(predictions, targets)
    except NoFitError as reason:
        raise UserError(f"calibrate.calibrator ({name}): {reason}") from None
    fits: dict[str, Fit] = {}
    fallbacks = {}
    for group in sorted({group for group in groups if group}):
        members = np.array(groups, dtype=object) == group
        try:
            fits[group] = fit(predictions[members], targets[members])
        except NoFitError as reason:
            fallbacks[group] = str(reason)
            warnings.warn(f"calibrate: {group!r} gets the pooled line: {reason}", stacklevel=3)
    return {"pooled": pooled, "groups": fits, "fallbacks": fallbacks}


def select_fits(fits: Mapping[str, Fit], pooled: Fit, groups: Sequence[str], n: int) -> list[Fit]:
    """Return the fit of each of ``n`` predictions: its group's, else with a warning ``pooled``."""
    if len(groups) != n:
        raise UserError(
            f"calibrate: {len(groups)} groups for {n} predictions; allowed: one "
            "group for each prediction"
        )
    if missing := sorted({group for group in groups if group not in fits}):
        names = ", ".join(map(repr, missing))
        warnings.warn(f"calibrate: no line for {names}; the pooled line is used", stacklevel=3)
    return [fits.get(group, pooled) for group in groups]


def check_ages_allow_fit(ages: np.ndarray, min_pairs: int) -> None:
    if len(ages) < min_pairs:
        raise NoFitError(f"found {len(ages)} pairs; allowed: {min_pairs} or more")
    if ages.max() == ages.min():
        raise NoFitError(f"all {len(ages)} ages are {ages[0]:g}; allowed: two ages or more")


def convert_to_finite_vector(name: str, values: Any) -> np.ndarray:
    """Return the values (N,) as fp64; UserError for another shape, and for non-finite values."""
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise UserError(f"calibrate: {name} of shape {values.shape}; allowed: (N,)")
    if bad := int((~np.isfinite(values)).sum()):
        faults = f"{bad} of {len(values)} {name} are NaN or infinite"
        raise UserError(f"calibrate: {faults}; allowed: finite numbers")
    return values

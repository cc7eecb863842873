"""Temperature scaling: one scalar that divides every logit, fitted on the validation split.

N images, K classes. Source: Guo et al. (2017).
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.tasks.base import Task

Slope = Callable[[float], tuple[float, float]]  # β → dNLL/dβ, d²NLL/dβ²


class FittedTemperature(Config):
    """A fitted temperature; ``to_json`` and ``from_json`` keep it exactly."""

    kind: Literal["temperature"] = "temperature"
    temperature: float = Field(
        gt=0, allow_inf_nan=False, description="What the logits are divided by."
    )
    at_limit: bool = Field(
        False,
        description="True where the best temperature lies beyond the limits and the nearer limit "
        "stands in for it.",
    )

    def apply(self, logits: Tensor) -> Tensor:
        """Calibrated logits, (N, K) to (N, K); the order of the classes stays, and the accuracy."""
        return logits / self.temperature

    def to_json(self) -> str:
        """The fitted calibrator as one line of JSON."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> "FittedTemperature":
        """Read what ``to_json`` wrote; raises pydantic's ValidationError for anything else."""
        return cls.model_validate_json(text)


class Temperature(Config):
    """Fits one temperature by the negative log-likelihood."""

    kind: Literal["temperature"] = "temperature"
    lowest: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Smallest temperature; reached where every validation image is right.",
    )
    highest: float = Field(
        20.0,
        gt=1,
        le=1e6,
        description="Largest temperature; reached where the logits say nothing of the labels.",
    )

    def calibrates(self, task: Task) -> bool:
        """Whether predictions of this task are logits of one class an image, or a token."""
        return task.kind in ("classification", "next_token")

    @property
    def needs_out_of_fold(self) -> bool:
        """Whether it is fitted to what the stage ``out_of_fold`` predicts: never."""
        return False

    def fit(self, logits: Tensor, labels: Tensor) -> FittedTemperature:
        """The temperature with the smallest NLL, by safeguarded Newton steps in fp64.

        logits: (N, K); labels: (N,), of the validation split, never of the test split. ``at_limit``
        of the result tells where no temperature inside the limits is best (perfect separation, or
        logits without information).
        Raises UserError for no images, fewer than two classes (in the model or among the labels),
        logits that are not finite, and labels outside the model's classes.
        """
        _check(logits, labels)
        logits = logits.detach().double().cpu()
        labels = labels.long().cpu()
        return self.fit_slope(lambda beta: slope(logits, labels, beta))

    def fit_slope(self, at: Slope, close: float = 1e-12) -> FittedTemperature:
        """The same of an NLL that is given by its derivatives in β = 1/T: of predictions that are
        too many to be there at once. close: relative step at which Newton's are at their end.
        """
        low, high = 1 / self.highest, 1 / self.lowest
        limits = {low: self.highest, high: self.lowest}
        beta = _root(at, low, high, close)
        return FittedTemperature(temperature=limits.get(beta, 1 / beta), at_limit=beta in limits)


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[0] == 0 or labels.shape != logits.shape[:1]:
        found = f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        raise UserError(
            f"calibrate: {found} of the validation split; (N, K) and (N,) with N ≥ 1 are needed"
        )
    if not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits)).any(dim=1).sum())
        raise UserError(
            f"calibrate: {bad} of {len(logits)} validation images have NaN or infinite logits; the "
            "model is damaged, train it again"
        )
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        found = f"labels go from {int(labels.min())} to {int(labels.max())}"
        raise UserError(f"calibrate: {found}; the model has the classes 0 to {logits.shape[1] - 1}")
    if labels.min() == labels.max():
        raise UserError(
            f"calibrate: all {len(labels)} validation labels are of class {int(labels[0])}; a "
            "temperature needs two classes or more"
        )


def _root(at: Slope, low: float, high: float, close: float) -> float:
    """β = 1/T at the NLL's minimum in [low, high], one of its ends where it lies beyond.

    The NLL is convex in β: the slope's sign keeps the bracket, Newton finds the root in it. An end
    is looked at only where Newton's steps lead there.
    """
    lowest, highest = low, high
    beta = 1.0
    for _ in range(200):
        slope, curvature = at(beta)
        if (beta == lowest and slope >= 0) or (beta == highest and slope <= 0):
            return beta
        if slope < 0:
            low = beta
        else:
            high = beta
        newton = beta - slope / curvature if curvature > 0 else -math.copysign(math.inf, slope)
        following = _within(newton, low, high, (lowest, highest))
        if abs(following - beta) <= close * beta:
            return following
        beta = following
    return beta


def _within(newton: float, low: float, high: float, limits: tuple[float, float]) -> float:
    """Newton's step, or one inside the bracket; a limit that was not looked at is tried itself."""
    if newton <= low:
        if low in limits:
            return low
        return math.sqrt(low * high)
    if newton >= high:
        if high in limits:
            return high
        return math.sqrt(low * high)
    return newton


def slope(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float]:
    """First and second derivative of the mean NLL in β: E[z̄ − z_label] and E[Var z].

    Both under softmax(βz).
    """
    probs = torch.softmax(beta * logits, dim=1)
    mean = (probs * logits).sum(1)
    variance = (probs * (logits - mean[:, None]).square()).sum(1)
    chosen = logits.gather(1, labels[:, None])[:, 0]
    return float((mean - chosen).mean()), float(variance.mean())

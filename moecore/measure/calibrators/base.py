"""Interfaces of calibrators and of what they fit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

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
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="Of the model.safetensors that predicted the numbers; set by the stage.",
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
        """Return, per prediction, the fit that calibrates it: the name of its group or "pooled"."""
        return [POOLED] * len(groups)

    @property
    def summary(self) -> str:
        """Return the fit in a few words, such as "temperature 1.3"."""
        return str(self.kind)


class Calibrator(Part, ABC):
    """A calibrator of predictions, a family of parts; for words, a subclass of Temperature."""

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


def read_fitted(path: Path, predicts: Literal["classes", "numbers"]) -> FittedCalibrator:
    """Return the calibrator in a calibrator.json; UserError if it is not for ``predicts``."""
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

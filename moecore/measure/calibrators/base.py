"""What every calibrator says of itself, and what it leaves."""

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
    """What a calibrator fitted, as calibrator.json keeps it; ``kind`` is that of the calibrator."""

    uses_age: ClassVar[bool] = False  # then ``apply`` takes the known ages, too: see there

    kind: Any
    predictor_sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="Of the model.safetensors that predicted numbers; the stage fills it in.",
    )

    @abstractmethod
    def apply(self, predictions: Any, groups: Sequence[str] | None = None) -> Any:
        """Return calibrated predictions: logits (N, K) of classes, or numbers (N,) fp64.

        groups: a name (sex) for each of N numbers, which it may look at; None: at none. Where it
        ``uses_age``, a third argument ``ages`` (N,): what it returns then serves the difference
        from the age, and is no prediction of the age.
        """

    def used(self, groups: Sequence[str]) -> list[str]:
        """Return whose fit calibrates each prediction: the group's, or ``pooled``."""
        return [POOLED] * len(groups)

    @property
    def summary(self) -> str:
        """Return in a few words what was fitted."""
        return str(self.kind)


class Calibrator(Part, ABC):
    """A calibrator of predictions, a family of parts; of words only a child of Temperature."""

    predicts: ClassVar[Literal["classes", "numbers"]]  # what it is given: logits (N, K), or (N,)
    tasks: ClassVar[tuple[str, ...]]  # the kinds of tasks whose predictions it knows
    fitted: ClassVar[type[FittedCalibrator]]  # what ``fit`` returns

    @property
    def split(self) -> FitOn:
        """Return whose predictions it is fitted to."""
        return "validation"

    @abstractmethod
    def fit(
        self, predictions: Any, labels: Any, groups: Sequence[str] | None = None
    ) -> FittedCalibrator:
        """Return what is fitted to the predictions and labels of ``split``; UserError where none.

        predictions: logits (N, K) with labels int64 (N,), or numbers (N,) fp64 with numbers; of the
        latter groups (N,), "" is unknown.
        """


def read_fitted(path: Path, predicts: Literal["classes", "numbers"]) -> FittedCalibrator:
    """Return what a calibrator.json holds; UserError where it is none of such predictions."""
    content = read_json(path)
    kind = str(content.get("kind")) if isinstance(content, dict) else ""
    try:
        part = find_class(Calibrator, kind)
    except KeyError:
        raise UserError(f"{path}: found no fitted calibrator of this version") from None
    except ValueError as error:
        raise UserError(f"{path}: kind: {error}") from None
    if part.predicts != predicts:
        problem = f"found {kind}, which calibrates {part.predicts}"
        raise UserError(f"{path}: {problem}; allowed: a calibrator of {predicts}")
    return read_json_settings(path, part.fitted, "a fitted calibrator")

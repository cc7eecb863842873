"""The words that all measurements share: subject, estimate, parts, why something was skipped."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

from pydantic import BeforeValidator, ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError, read_json
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Estimate as Estimate
from moecore.training.guide import Guide

SEED = 0  # of all that measurements draw: every method is measured on the same
R = TypeVar("R", bound=Config)


def finite_or_none(value: float | None) -> float | None:
    """A number as JSON has it: None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, BeforeValidator(finite_or_none)]


class Skipped(Config):
    """Stands in the place of a result where the measurement does not apply."""

    skipped: str  # why, in words


class MeasuredModel(NamedTuple):
    """A trained model, on its device and in evaluation mode, and the data of its phase."""

    model: Model
    data: Prepared
    guide: Guide | None = None  # the teacher that the model learned its routing from
    device: str = "cpu"
    regions: tuple[str, ...] = ()  # the tissues after which its first experts are named


class PartStore(Protocol):
    """Keeps the finished pieces of a measurement over a kill, each under a name of its own."""

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` returns, once it has been JSON; computed once, kills or not."""
        ...


class Measurement(NamedTuple):
    """One thing that is measured of a trained model: the four names of its file."""

    settings: type[Config]  # the section of params.yaml
    result: type[Config]
    applies: Callable[[MeasuredModel], str | None]  # why not, in words; None where it applies
    measure: Callable[[MeasuredModel, Any, PartStore], Config]
    guided: bool = False  # whether it looks at ``MeasuredModel.guide``
    regions: bool = False  # whether it looks at ``MeasuredModel.regions``

    @classmethod
    def of(
        cls, module: Any, settings: type[Config], guided: bool = False, regions: bool = False
    ) -> "Measurement":
        """The measurement whose file ``module`` is."""
        return cls(settings, module.Result, module.applies, module.measure, guided, regions)


def no_flat_images_reason(subject: MeasuredModel, needed: str) -> str | None:
    """Why these are no flat images whose labels can do ``needed`` (see Task.needs_classes)."""
    if subject.data.test.images.ndim != 4:
        return "the images are volumes, and flat images are measured"
    return subject.data.task.needs_classes(needed)


def load_or_compute(parts: PartStore, name: str, model: type[R], compute: Callable[[], R]) -> R:
    """Return what ``compute`` returns, or what a killed process kept of it under ``name``."""
    return model.model_validate(parts(name, lambda: compute().model_dump(mode="json")))


def read_result(path: str | Path, model: type[R], stage: str) -> R | Skipped:
    """The result that ``stage`` wrote to ``path``, or why there is none.

    Raises UserError where the file is missing, damaged, or of other code than this.
    """
    if not Path(path).is_file():
        again = f"the stage {stage} writes it: run `dvc repro {stage}`"
        raise UserError(f"{path}: no such file; {again}")
    content = read_json(path)
    if isinstance(content, dict) and set(content) == {"skipped"}:
        return Skipped.model_validate(content)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(word) for word in first["loc"])
        reason = f"{place}: {first['msg']}"
        again = f"run `dvc repro {stage}`"
        raise UserError(
            f"{path}: was written by an older version of moecore ({reason}); {again}"
        ) from None

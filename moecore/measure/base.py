"""The words that all measurements share: subject, estimate, parts, why something was skipped."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BeforeValidator, ValidationError

from moecore.core.config import Config, find_class, list_own_names
from moecore.core.files import UserError, read_json
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.measure.values import Metric, OnPage, PartStore, Place, Values
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


class MeasuredPart(Config):
    """What is measured where settings ask for it: metrics, and how the page shows them."""

    metrics: ClassVar[Mapping[str, Metric]] = {}
    page: ClassVar[OnPage] = OnPage("")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why no such model can be measured, in words; None where it can.

        ``moecore check`` asks it of models without memory, before anything is trained.
        """
        return None

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return how labels say a place."""
        return f"{place:g}" if isinstance(place, float) else str(place)

    @property
    def pieces(self) -> int:
        """Return into how many pieces it falls, where it is long and progress is shown; or 0."""
        return 0

    def places(self) -> Mapping[str, Iterable[Place]]:
        """Return where values will stand, as far as settings tell it before anything has run."""
        return {}


class Measurement(MeasuredPart, ABC):
    """What is measured of a trained model, a family of parts: a section of params.yaml each.

    The section ``few_shot`` is the class FewShot of few_shot.py in this folder; ``my_lab:
    {brightness: …}``, which run.measurements calls my_lab.brightness, is Brightness of that module.
    It declares ``metrics`` and puts values under their names. One without them and without a title
    on the page gives a typed result instead, of which the report shows what a ``Shown`` says
    (moecore/report/measures).
    """

    # Settings by which the section asks for more, by name: their values lie in the same file, and
    # Found.facts has under the name what else there is, None, or why there is none.
    parts: ClassVar[Mapping[str, type[MeasuredPart]]] = {}
    guided: ClassVar[bool] = False  # whether it looks at ``MeasuredModel.guide``
    regions: ClassVar[bool] = False  # whether it looks at ``MeasuredModel.regions``
    tasks: ClassVar[tuple[str, ...]] = ()  # kinds of the tasks that it is of; (): any
    flat_classes: ClassVar[bool] = False  # it is of flat images with classes alone

    @classmethod
    def data_refusal(cls, source: Source) -> str | None:
        """Return why no such data can be measured, in words; None where they can.

        ``moecore check`` asks it before the data are prepared.
        """
        kind = source.labels_task.class_kind()
        if cls.tasks and kind not in cls.tasks:
            return f"is of the tasks {', '.join(cls.tasks)} and not of {kind}"
        if cls.flat_classes and (source.volumes or source.labels_task.needs_classes("classes")):
            return "is of flat images with classes"
        return None

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Return why it does not apply to this model and data, in words; None where it does."""
        return cls.model_refusal(subject.model)

    @classmethod
    def puts_values(cls) -> bool:
        """Return whether it puts values or facts, and gives no typed result."""
        return bool(cls.metrics or cls.page.title)

    @abstractmethod
    def measure(self, subject: MeasuredModel, out: Any, /) -> Config | None:
        """Put values into ``out``, a ``Values``: a function of the arguments alone.

        Without metrics: return a typed result; ``out`` is then the ``PartStore``.
        """

    def collect_result(self, subject: MeasuredModel, parts: PartStore) -> Config:
        """Return what the stage writes."""
        if not self.puts_values():
            result = self.measure(subject, parts)
            assert result is not None, f"{type(self).__name__} has no metrics and no result"
            return result
        metrics = dict(self.metrics)
        for part in self.parts.values():
            metrics |= part.metrics
        out = Values(metrics, subject.data.task, parts)
        self.measure(subject, out)
        return out.found()


@cache
def builtin_measurements() -> dict[str, type[Measurement]]:
    """Return our measurements by the names of their sections."""
    return {name: find_class(Measurement, name) for name in list_own_names(Measurement)}


def find_measurement(name: str) -> type[Measurement]:
    """Return a measurement by its name. Raises UserError where there is none."""
    try:
        return find_class(Measurement, name)
    except KeyError:
        allowed = ", ".join(builtin_measurements())
        raise UserError(f"measure: found {name}; allowed: {allowed}") from None
    except ValueError as error:
        raise UserError(f"measure: {error}") from None


def no_flat_images_reason(subject: MeasuredModel, needed: str) -> str | None:
    """Why these are no flat images whose labels can do ``needed`` (see Task.needs_classes)."""
    if subject.data.test.images.ndim != 4:
        return "the images are volumes, and flat images are measured"
    return subject.data.task.needs_classes(needed)


def no_changed_images_reason(subject: MeasuredModel, needed: str) -> str | None:
    """Why flat images cannot be changed and then asked for ``needed``."""
    if subject.model.image.truth:
        return "a change of the images would falsify the truth that one of their channels says"
    return no_flat_images_reason(subject, needed)


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

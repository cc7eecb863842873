"""Base classes of measurements with and without a trained model; reading of their results."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import BeforeValidator, ValidationError

from moecore.core.config import Config, builtin_kinds, find_class
from moecore.core.files import UserError, read_json
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.measure.values import Found, Metric, OnPage, PartStore, Place, Value, Values
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Estimate as Estimate
from moecore.tasks.classification import Classification
from moecore.training.method import Guide

SEED = 0  # of all random draws, so that every method is measured on the same ones
R = TypeVar("R", bound=Config)


# A number, or None where it is not finite, which JSON cannot hold.
Number = Annotated[
    float | None,
    BeforeValidator(lambda value: None if value is None or not math.isfinite(value) else value),
]


class SkipReason(Config):
    """Content of the result file of a measurement that does not apply to the model or the data."""

    skipped: str  # the reason


class MeasuredModel(NamedTuple):
    """A trained model on its device in evaluation mode, and the data of its training phase."""

    model: Model  # on ``device``, in evaluation mode
    data: Prepared  # of its phase; measurements read the test split
    guide: Guide | None = None  # the teacher that the model learned its routing from
    device: str = "cpu"  # a name that torch accepts
    regions: tuple[str, ...] = ()  # tissues that its first experts are named after
    # name → folder of images that the stage transferred attacked on another model
    transferred: Mapping[str, Path] = {}


class MeasuredPart(Config):
    """Base of ``Measurement`` and its parts: they declare settings, metrics and a page section."""

    metrics: ClassVar[Mapping[str, Metric]] = {}  # name → metric, for which it puts values
    page: ClassVar[OnPage] = OnPage("")  # title, place and charts of its section of the report
    no_dense: ClassVar[str] = ""  # the reason why a dense model cannot be measured; "": it can

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return the reason why such a model cannot be measured; None if it can.

        ``moecore check`` calls it with models on the meta device, before anything is trained.
        """
        if cls.no_dense and model.moe is None:
            return cls.no_dense
        return None

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return a place of a value, such as an epsilon or a layer, as text for labels."""
        return f"{place:g}" if isinstance(place, float) else str(place)

    @property
    def pieces(self) -> int:
        """Number of steps that are stored and shown as progress; 0 for a short measurement."""
        return 0

    def places(self) -> Mapping[str, Iterable[Place]]:
        """Return places of values that settings fix, by name in ``Value.at``: "k" → (1, 2)."""
        return {}


class Measurement(MeasuredPart, ABC):
    """A measurement of a trained model; each has a section of params.yaml.

    The section ``few_shot`` is the class FewShot of few_shot.py in this folder. The section
    ``my_lab: {brightness: …}``, which run.measurements calls my_lab.brightness, is the class
    Brightness of that module. A measurement declares ``metrics`` and puts values under their
    names; ``moecore check`` refuses one without metrics and without a page title.
    """

    # Optional settings of the section, by name. Their values are in the same file; Found.facts has
    # under that name further data, None, or the reason why the part was skipped.
    parts: ClassVar[Mapping[str, type[MeasuredPart]]] = {}
    guided: ClassVar[bool] = False  # whether it reads ``MeasuredModel.guide``
    regions: ClassVar[bool] = False  # whether it reads ``MeasuredModel.regions``
    tasks: ClassVar[tuple[str, ...]] = ()  # kinds of tasks that it applies to; (): any
    flat_classes: ClassVar[bool] = False  # whether it needs flat images with classes
    classes_for: ClassVar[str] = "classes"  # what it needs them for, as in Task.needs_classes
    changes_images: ClassVar[bool] = False  # refused if a channel holds the true kinds of patches

    @classmethod
    def data_refusal(cls, source: Source) -> str | None:
        """Return the reason why such data cannot be measured, or None.

        ``moecore check`` calls it before the data are prepared.
        """
        kind = source.labels_task.class_kind()
        if cls.tasks and kind not in cls.tasks:
            return f"is of the tasks {', '.join(cls.tasks)} and not of {kind}"
        if cls.flat_classes and (source.volumes or source.labels_task.needs_classes("classes")):
            return "is of flat images with classes"
        return None

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Return the reason why the measurement does not apply to this model and data, or None."""
        if reason := cls.model_refusal(subject.model):
            return reason
        if cls.changes_images and subject.model.image.truth:
            return "a change of the images would falsify the truth that one of their channels says"
        if not cls.flat_classes:
            return None
        if subject.data.test.images.ndim != 4:
            return "the images are volumes, and flat images are measured"
        return subject.data.task.needs_classes(cls.classes_for)

    @classmethod
    def puts_values(cls) -> bool:
        """Return whether it declares metrics or a page title: the report then reads its values."""
        return bool(cls.metrics or cls.page.title)

    @abstractmethod
    def measure(self, subject: MeasuredModel, out: Values, /) -> None:
        """Measure the model and put the values in ``out``; they may depend on the arguments only.

        Args:
            subject: The trained model and its data.
            out: Takes the values.
        """

    def collect_result(self, subject: MeasuredModel, parts: PartStore) -> Found:
        out = Values(self.all_metrics(), subject.data.task, parts)
        self.measure(subject, out)
        return out.found()

    def all_metrics(self) -> dict[str, Metric]:
        """Return the metrics that the measurement and its parts declare, by name."""
        metrics = dict(self.metrics)
        for part in self.parts.values():
            metrics |= part.metrics
        return metrics


@cache
def builtin_measurements() -> dict[str, type[Measurement]]:
    return {name: find_class(Measurement, name) for name in builtin_kinds(Measurement)}


def find_measurement(name: str) -> type[Measurement]:
    try:
        return find_class(Measurement, name)
    except KeyError:
        allowed = ", ".join(builtin_measurements())
        raise UserError.at("measure", found=name, allowed=allowed) from None
    except ValueError as error:
        raise UserError(f"measure: {error}") from None


def load_or_compute(parts: PartStore, name: str, model: type[R], compute: Callable[[], R]) -> R:
    """Return the stored result ``name``; if no earlier process stored it, compute and store it."""
    return model.model_validate(parts(name, lambda: compute().model_dump(mode="json")))


def read_result(path: str | Path, model: type[R], stage: str) -> R | SkipReason:
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; stage {stage} writes it: run `dvc repro {stage}`")
    content = read_json(path)
    if isinstance(content, dict) and set(content) == {"skipped"}:
        return SkipReason.model_validate(content)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(word) for word in first["loc"])
        raise UserError(
            f"{path}: was written by an older version of moecore ({place}: {first['msg']}); "
            f"run `dvc repro {stage}`"
        ) from None


PLACEHOLDER_TASK = Classification(classes=("", "."))  # of calculations, as ``Values`` needs one


class Calculation(Measurement):
    """A measurement that needs no trained model and no data; it runs once per study.

    ``my_lab.bound`` in run.calculations is the class Bound of module bound in the package my_lab,
    which params.yaml lists under ``packages``. Its fields are the section ``my_lab: {bound: …}``;
    as in any measurement, ``metrics`` declares its numbers and ``page`` its section of the page.
    """

    @abstractmethod
    def calculate(self, out: Values, /) -> None:
        """Compute the values and put them in ``out``; they may depend on the settings only.

        Args:
            out: Takes the values of the declared metrics.
        """

    def measure(self, subject: MeasuredModel, out: Values, /) -> None:
        self.calculate(out)

    def collect_values(self, parts: PartStore) -> Found:
        """Return all values that ``calculate`` puts; parts: the store of finished pieces."""
        # UserError if the places of two values give the same column name.
        out = Values(self.metrics, PLACEHOLDER_TASK, parts)
        self.calculate(out)
        result = out.found()
        places: dict[str, Value] = {}
        for value in result.values:
            (name,) = Found(values=(value,)).numbers()
            if name in places:
                both = f"{places[name].at} and {value.at}"
                raise UserError.at(name, found=both, allowed="places of other letters or digits")
            places[name] = value
        return result

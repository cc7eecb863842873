"""What a measurement finds: numbers under the names of its metrics, each at its place.

A measurement declares every number once, as a ``Metric`` beside its equation, and puts values under
that name. Columns of tables, planned names, intervals, tests, claims, charts and MLflow's names
follow from the declaration; nothing else describes a number.

Labels, notes and all that ``OnPage`` says change no result: the hash of a measurement's code leaves
them out (run/inputs.py), so that an edit of them reruns `compare` alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from moecore.core.config import Config
from moecore.core.encoded_arrays import decode_float_array, encode_exact, pack_numbers
from moecore.core.plain_values import to_jsonable
from moecore.statistics.crossed import linearize_by_person
from moecore.statistics.intervals import Interval, bootstrap_mean, mean_share
from moecore.tasks.base import Task

SCORE = "score"  # instead of a form, or of what is better: that of the task's score
Place = str | int | float
EVERYWHERE = (-math.inf, math.inf)


class Metric(NamedTuple):
    """A number that a measurement gives, declared where it is computed.

    In ``label`` and ``note`` {} stands for the place in words, {score} and {unit} for the words of
    the task's score, {baseline} for the baseline MoE (all: report's ``fill_words``); in ``name`` {}
    for the place as in names, {score} for the score's name.
    """

    label: str  # "" for a metric that charts alone show
    better: str = ""  # "higher", "lower", or "" where neither is better; SCORE
    form: str = "number"  # or "share", "count", "seconds", "bytes"; SCORE
    note: str = ""
    paper: str = ""  # a key of paper_numbers.PAPERS, or "" for what every paper reports
    over: str | tuple[str, ...] = ""  # a place, such as "transform", or several: a column for each
    last: str = ""  # one of ``over``: a column has the value at its last place only
    mean: str = ""  # label of the column of the mean over the places; "" for no such column
    chance: str = ""  # note of the column {metric}_chance in the full table; "" for no such column
    name: str = ""  # of the column; "" for the metric's, followed by the place
    detail: bool = False  # columns for each place (or the only one) are in the full table only
    signed: bool = False  # values per item may lie below 0, and above 1
    # Kind of one model's interval: "wilson", "quartiles", "draws"; "" for columns without one.
    limits: str = "bootstrap"
    # "exact": items are stored with all digits; "hits": and each item is right or wrong.
    items: str = ""
    is_fixed: bool = False  # by the settings: the same for every seed and all data
    is_monotone: bool = False  # by construction it only rises, or only falls, along its places
    needs: str = ""  # what a method must have, so that there is a value: a key of report's NEEDED
    # Instead of a value of its own: computed of a model's values and those of all dense models.
    of_dense: Callable[["Found", Sequence["Found"]], float | None] | None = None
    # Likewise, of a model's values, all of the baseline MoE, and that of the same seed.
    of_baseline: Callable[["Found", Sequence["Found"], "Found | None"], float | None] | None = None
    # Whether such a value is only a bound of what was not seen: no interval or test takes it.
    is_bound: Callable[["Found", float], bool] | None = None
    # Which images (N,) bool a share counted, read of all results of a model, by their kind.
    hits: Callable[[Mapping[type, Any]], np.ndarray | None] | None = None
    # Instead of a value of its own: computed of two seeds; the method's value is the pairs' mean.
    of_pairs: Callable[["Found", "Found"], float] | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """Return the names of the places that it has columns for."""
        over = (self.over,) if isinstance(self.over, str) else self.over
        return tuple(filter(None, over))


class Chart(NamedTuple):
    """A line per method over one place of a metric, with a band over seeds.

    {score} and {unit} in its words stand for those of the task's score.
    """

    metric: str
    over: str
    title: str
    x: str
    y: str
    words: str = ""  # of the caption
    share: bool | None = False  # the vertical axis is printed as percent; None: as the score is
    top: float | None = None  # where it ends, if it is a share
    limits: tuple[float, float] = EVERYWHERE  # of the bands
    height: float = 3.5  # inches


class OnPage(NamedTuple):
    """How the page shows a measurement."""

    title: str  # in the list of what was measured
    place: int = 100  # in the order of the page; of one place, by name
    heading: str = ""  # of its part; "" for the title
    charts: tuple[Chart, ...] = ()
    about: str = ""  # metric, or column, of the part's one line; "" for the first with a direction


class Value(Config):
    """One number of one model."""

    metric: str
    at: dict[str, Place] = {}
    value: float
    low: float | None = None  # its 95 % limits
    high: float | None = None
    items: str | None = None  # one value per item, whose mean it is, packed

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value not in (None, {})}

    @property
    def interval(self) -> Interval:
        """Return the value with its limits."""
        return Interval(self.value, self.low, self.high)

    @property
    def array(self) -> np.ndarray | None:
        """Return the values per item, (N,); None where there are none."""
        return None if self.items is None else decode_float_array(self.items)


class Found(Config):
    """All that a measurement found of one model: the file that its stage writes."""

    values: tuple[Value, ...]
    facts: dict[str, Any] = {}  # JSON: what pages and pictures need besides the values
    skipped: tuple[str, ...] = ()  # in words: what was not measured, and why

    def all(self, metric: str) -> list[Value]:
        """Return the values of a metric, at whatever place."""
        return [value for value in self.values if value.metric == metric]

    def find(self, metric: str, **at: Place) -> Value | None:
        """Return the value of a metric at exactly this place; None where there is none."""
        return next((value for value in self.all(metric) if value.at == at), None)

    def interval(self, metric: str, **at: Place) -> Interval | None:
        """Return the value of a metric at this place, with its limits; None where there is none."""
        value = self.find(metric, **at)
        return None if value is None else value.interval

    def curve(self, metric: str, over: str) -> dict[Any, float]:
        """Return place → value of the values that only ``over`` places."""
        return {
            value.at[over]: value.value for value in self.all(metric) if set(value.at) == {over}
        }

    def numbers(self) -> dict[str, float]:
        """Return the values by metric and place, as MLflow shows them."""
        return {
            "_".join([value.metric, *map(place_slug, value.at.values())]): value.value
            for value in self.values
        }


class PartStore(Protocol):
    """Keeps the finished pieces of a measurement over a kill, each under a name of its own."""

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` returns, once it has been JSON; computed once, kills or not."""
        ...


class Values:
    """Collects what a measurement finds of one model."""

    def __init__(self, metrics: Mapping[str, Metric], task: Task, parts: PartStore) -> None:
        self.metrics = metrics
        self.task = task
        self.parts = parts
        self.people: np.ndarray | None = None  # (N,), whose item each is, where people have several
        self.values: list[Value] = []
        self.facts: dict[str, Any] = {}
        self.skipped: list[str] = []

    def put(
        self,
        metric: str,
        value: float | Interval | np.ndarray | Tensor | None,
        interval: Interval | None = None,
        /,
        **at: Place,
    ) -> None:
        """Add a number, or one value per item (N,), whose mean it is; None adds nothing.

        interval: of the mean; None for the metric's own over items, and over people.
        """
        if isinstance(value, np.ndarray | Tensor):
            items = np.asarray(value, np.float64)
            interval = interval or self._interval(self.metrics[metric], items)
            pack = encode_exact if self.metrics[metric].items else pack_numbers
            packed = pack(linearize_by_person(items, self.people))
        else:
            interval = value if isinstance(value, Interval) or value is None else Interval(value)
            packed = None
        if interval is not None and math.isfinite(interval.value):
            limits = interval._asdict()
            self.values.append(Value(metric=metric, at=at, items=packed, **limits))

    def _interval(self, metric: Metric, items: np.ndarray) -> Interval:
        if metric.form == SCORE:
            return self.task.interval(torch.from_numpy(items), self.people)
        if metric.signed:
            return bootstrap_mean(items, lowest=-np.inf, people=self.people)
        mean = mean_share if metric.form == "share" else bootstrap_mean
        return mean(items, people=self.people)

    def piece(self, name: str, compute: Callable[["Values"], None]) -> None:
        """Add what ``compute`` puts, or what a killed process kept of it under this name."""

        def fresh() -> dict[str, Any]:
            part = Values(self.metrics, self.task, self.parts)
            part.people = self.people
            compute(part)
            return part.found().model_dump(mode="json")

        kept = Found.model_validate(self.parts(name, fresh))
        self.values += kept.values
        self.facts |= kept.facts
        self.skipped += kept.skipped

    def found(self) -> Found:
        """Return all that was put."""
        return Found(values=self.values, facts=to_jsonable(self.facts), skipped=self.skipped)


def place_slug(place: Place) -> str:
    """Return a place as in names: "translation (0, 0.1)" → translation_0_0_1, -0.5 → -0_5."""
    if isinstance(place, float):
        return f"{place:g}".replace(".", "_")
    return re.sub(r"\W+", "_", str(place)).strip("_")

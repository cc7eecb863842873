"""Declared metrics, and the values that a measurement puts for them.

A measurement declares every number once, as a ``Metric``, and puts values under that name. Table
columns, planned names, intervals, tests, claims, charts and MLflow's names follow from it.

The code hash leaves out labels, notes and ``OnPage`` (run/stage_inputs.py): editing them reruns
`compare` alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from moecore.core import config, files
from moecore.core.arrays_as_text import decode_float_array, encode_exact, encode_rounded
from moecore.statistics.comparisons import linearize_by_person
from moecore.statistics.intervals import Interval, People, bootstrap_mean, mean_share
from moecore.tasks.base import Task

SCORE = "score"  # as a form or direction: that of the task's score
BETTER = ("", "higher", "lower", SCORE)  # directions; "" where neither is better
FORMS = ("number", "share", "count", "seconds", "bytes", SCORE)
Place = str | int | float
EVERYWHERE = (-math.inf, math.inf)


class Metric(NamedTuple):
    """A number that a measurement gives, declared where it is computed.

    A value's place says where it was measured, such as at an epsilon or in a layer. ``label`` and
    ``note`` may contain {} for the place, {baseline} for the baseline MoE, and words for the task's
    score, which ``report.column.fill_score_words`` fills in: {score}, {unit}, {tested}, {meaning},
    {items}. ``name`` may contain {} for the place and {score} for the score's name.
    """

    label: str  # "" for a metric that charts alone show
    better: str = ""  # one of BETTER: "higher", "lower", "" where neither is better, "score"
    form: str = "number"  # one of FORMS: "share", "count", "seconds", "bytes", "score"
    note: str = ""  # what it is, for the glossary of the page
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
    # Computes the value instead, from the model's values and the values of all dense models.
    of_dense: Callable[["Found", Sequence["Found"]], float | None] | None = None
    # Likewise, from the values of the model, of all baseline MoEs, and of the same seed's.
    of_baseline: Callable[["Found", Sequence["Found"], "Found | None"], float | None] | None = None
    # Whether such a value is only a bound: it then has no interval and is not tested.
    is_bound: Callable[["Found", float], bool] | None = None
    # Which images (N,) bool a share counted; reads all results of a model, by their kind.
    hits: Callable[[Mapping[type, Any]], np.ndarray | None] | None = None
    # Computes the value instead, from two seeds; a method's value is the mean over its pairs.
    of_pairs: Callable[["Found", "Found"], float] | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """Names of what the metric's columns range over, such as ("attack", "epsilon")."""
        over = (self.over,) if isinstance(self.over, str) else self.over
        return tuple(filter(None, over))


class Chart(NamedTuple):
    """A chart of a metric over one of its places: a line per method, with a band over seeds.

    The texts may contain {score} and {unit}, which stand for the words of the task's score.
    """

    metric: str  # a declared one, with values at places of ``over``
    over: str  # the place along the horizontal axis
    title: str  # above the chart
    x: str  # label of the horizontal axis
    y: str  # label of the vertical axis
    words: str = ""  # of the caption
    share: bool | None = False  # whether the vertical axis shows percent; None: as for the score
    top: float | None = None  # of the vertical axis, if it shows percent
    limits: tuple[float, float] = EVERYWHERE  # of the bands
    height: float = 3.5  # inches


class OnPage(NamedTuple):
    """How the page shows a measurement."""

    title: str  # in the list of what was measured
    place: int = 100  # on the page, ascending; equal places are ordered by name
    heading: str = ""  # of its section; "" for the title
    charts: tuple[Chart, ...] = ()  # in their order on the page
    about: str = ""  # metric or column shown while folded; "": the first column with a direction


class Value(config.Config):
    """One number of one model, with its metric, its place and 95 % limits."""

    metric: str
    at: dict[str, Place] = {}
    value: float
    low: float | None = None  # its 95 % limits
    high: float | None = None
    items: str | None = None  # one value per item (or person), encoded; their mean is ``value``

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value not in (None, {})}

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.low, self.high)

    @property
    def item_values(self) -> np.ndarray | None:
        if self.items is None:
            return None
        return decode_float_array(self.items)


class Found(config.Config):
    """Result of one measurement of one model, as its stage stores it: all values and facts."""

    values: tuple[Value, ...]
    facts: dict[str, Any] = {}  # JSON: extra data for pages and pictures
    skipped: tuple[str, ...] = ()  # sentences: what was not measured, and why

    def all(self, metric: str) -> list[Value]:
        return [value for value in self.values if value.metric == metric]

    def find(self, metric: str, **at: Place) -> Value | None:
        return next((value for value in self.all(metric) if value.at == at), None)

    def interval(self, metric: str, **at: Place) -> Interval | None:
        value = self.find(metric, **at)
        return None if value is None else value.interval

    def curve(self, metric: str, over: str) -> dict[Any, float]:
        """Return place → value of a metric, for its values that have the single place ``over``."""
        return {row.at[over]: row.value for row in self.all(metric) if set(row.at) == {over}}

    def numbers(self) -> dict[str, float]:
        """Return "{metric}_{place}…" → value, under the names that MLflow shows."""
        return {
            "_".join([value.metric, *map(place_slug, value.at.values())]): value.value
            for value in self.values
        }


class PartStore(Protocol):
    """Stores finished pieces of a measurement under unique names, so that a restart skips them."""

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a piece as decoded from JSON, computed unless an earlier process stored it."""
        # compute: returns the piece, as plain values that JSON can hold.
        ...


class Values:
    """Collects the values of a measurement of one model.

    Args:
        metrics: Declared metrics by name.
        task: Task of the data; it gives the intervals of scores.
        parts: Store of finished pieces.
    """

    def __init__(self, metrics: Mapping[str, Metric], task: Task, parts: PartStore) -> None:
        self.metrics = metrics
        self.task = task
        self.parts = parts
        self.people: People = None  # (N,), the person of each item; None: each is another person's
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
        """Add a value of a metric; None, or a value that is not finite, adds nothing.

        Args:
            metric: Name of a declared metric.
            value: A number, an interval, or one value per item (N,), which are averaged.
            interval: Of that mean; None for the metric's own interval over items or people.
            **at: Places by name.
        """
        if isinstance(value, np.ndarray | Tensor):
            items = np.asarray(value, np.float64)
            interval = interval or self._interval(self.metrics[metric], items)
            pack = encode_exact if self.metrics[metric].items else encode_rounded
            packed = pack(linearize_by_person(items, self.people))
        else:
            interval = value if isinstance(value, Interval) or value is None else Interval(value)
            packed = None
        if interval is not None and math.isfinite(interval.value):
            self.values.append(Value(metric=metric, at=at, items=packed, **interval._asdict()))

    def _interval(self, metric: Metric, items: np.ndarray) -> Interval:
        if metric.form == SCORE:
            return self.task.interval(torch.from_numpy(items), self.people)
        if metric.signed:
            return bootstrap_mean(items, lowest=-np.inf, people=self.people)
        mean = mean_share if metric.form == "share" else bootstrap_mean
        return mean(items, people=self.people)

    def piece(self, name: str, compute: Callable[["Values"], None]) -> None:
        """Add the values that ``compute`` puts, or that an earlier process stored as ``name``."""

        def fresh() -> dict[str, Any]:
            part = Values(self.metrics, self.task, self.parts)
            part.people = self.people
            compute(part)
            return part.found().model_dump(mode="json")

        stored = Found.model_validate(self.parts(name, fresh))
        self.values += stored.values
        self.facts |= stored.facts
        self.skipped += stored.skipped

    def found(self) -> Found:
        return Found(values=self.values, facts=files.to_jsonable(self.facts), skipped=self.skipped)


def place_slug(place: Place) -> str:
    """Return a place as part of a name: "translation (0, 0.1)" → translation_0_0_1, -0.5 → -0_5."""
    if isinstance(place, float):
        return f"{place:g}".replace(".", "_")
    return re.sub(r"\W+", "_", str(place)).strip("_")

"""One column of numbers: where it is read from, how it is shown, and what makes two of its values differ."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moecore.evaluation.intervals import Interval
from moecore.report.results import Measured

Reader = Callable[[Measured], Any]
Hits = Callable[[Measured], np.ndarray | None]


class Metric(NamedTuple):
    """A column of numbers: where it is read from, and how it is shown.

    read: the value of one model, an ``Interval`` where one model gives limits, or None where the model has no such thing.
    hits: for a share of images, which images (N,) bool were counted; None where that is not known.
    """

    name: str
    label: str
    read: Reader
    better: str  # "higher", "lower" or "" where neither is better
    form: str = "number"  # or "share", "count", "seconds", "bytes"
    note: str = ""
    paper: str = ""  # a key of paper_figures.PAPERS, or "" for what every paper reports
    hits: Hits | None = None
    limits: str = "bootstrap"  # what one model's limits are: "wilson", "bootstrap" or "quartiles"
    detail: bool = False  # in the full table and in compare.json only


def slug(name: str) -> str:
    """A transform's name inside the name of a metric: "translation (0, 0.1)" → translation_0_0_1."""
    return re.sub(r"\W+", "_", name).strip("_")


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None where there is nothing."""
    return sum(values) / len(values) if values else None


def value_of(stored: Any) -> Any:
    """A stored number, or {value, low, high} as an Interval; None stays None."""
    return Interval(stored["value"], stored["low"], stored["high"]) if isinstance(stored, Mapping) else stored


def number(found: Any) -> float:
    """The value itself of what a metric read."""
    return found.value if isinstance(found, Interval) else float(found)

"""Deprecated until 0.4: typed results and SHOWN of users' modules, converted to values."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.arrays_as_text import encode_exact
from moecore.core.config import Config
from moecore.measure.base import Estimate, MeasuredPart, Skipped, read_result
from moecore.measure.values import Found, Metric, OnPage, Value
from moecore.report.results import Draw, Pictures


class Column(NamedTuple):
    """A value read from a typed result; the other fields are as in ``Metric``.

    Attributes:
        read: Returns the value of a result: a number, an ``Estimate``, or None.
        items: Returns one value per item (N,), or None.
    """

    name: str
    label: str
    read: Callable[..., Any]
    better: str = ""
    form: str = "number"
    note: str = ""
    paper: str = ""
    items: Callable[[Any], Any] = lambda result: None


def show_typed_result(
    stage: str,
    title: str,
    result: type[Config],
    columns: Sequence[Column] = (),
    figures: Draw = lambda result: iter(()),
    place: int = 100,
) -> Pictures:
    """Return the page of a typed result, with a warning that this is deprecated.

    Args:
        stage: Name of the measurement.
        title: Title in the list of measurements.
        result: Class of the result.
        columns: Values of the result that tables show.
        figures: Yields (name, figure) of a result.
        place: Position on the page, ascending.
    """
    warnings.warn(
        f"{stage}: SHOWN is read until 0.4; declare metrics and put values "
        "(docs/tutorials/own_measurement.md)",
        DeprecationWarning,
        2,
    )
    metrics = {
        column.name: Metric(column.label, column.better, column.form, column.note, column.paper)
        for column in columns
    }
    fields = {"metrics": metrics, "page": OnPage(title, place)}
    kind = type(MeasuredPart)(stage, (MeasuredPart,), fields)

    def collect_values(path: Path, of_stage: str) -> Found | Skipped:
        typed = read_result(path, result, of_stage)
        if isinstance(typed, Skipped):
            return typed
        values = []
        for column in columns:
            number, items = column.read(typed), column.items(typed)
            packed = None if items is None else encode_exact(np.asarray(items, float))
            limits = number.model_dump() if isinstance(number, Estimate) else {"value": number}
            if number is not None:
                values.append(Value(metric=column.name, items=packed, **limits))
        return Found(values=values, facts={"result": typed})

    draw: Draw = lambda values: figures(values.facts["result"])
    return Pictures(stage, draw, kind=kind, read=collect_values)


Shown = show_typed_result  # its name in users' modules

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
    """A value read from a typed result; the other fields are as in ``Metric``."""

    name: str
    label: str
    read: Callable[..., Any]  # a result → a number, an ``Estimate``, or None
    better: str = ""
    form: str = "number"
    note: str = ""
    paper: str = ""
    items: Callable[[Any], Any] = lambda result: None  # a result → one value per item (N,)


def show_typed_result(
    stage: str,  # name of the measurement
    title: str,  # in the list of measurements
    result: type[Config],  # class of the result
    columns: Sequence[Column] = (),  # that tables show
    figures: Draw = lambda result: iter(()),  # yields (name, figure) of a result
    place: int = 100,  # on the page, ascending
) -> Pictures:
    """Return the page of a typed result, with a warning that this is deprecated."""
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

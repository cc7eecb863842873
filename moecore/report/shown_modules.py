"""Users' modules with a typed result and SHOWN: results become values, until 0.4."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.encoded_arrays import encode_exact
from moecore.measure.base import Estimate, MeasuredPart, Skipped, read_result
from moecore.measure.values import Found, Metric, OnPage, Value
from moecore.report.results import Draw, Pictures


class Column(NamedTuple):
    """What is read from one typed result."""

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
    """Return the page of a typed result, and warn."""
    instead = "declare metrics and put values (docs/tutorials/own_measurement.md)"
    warnings.warn(f"{stage}: SHOWN is read until 0.4; {instead}", DeprecationWarning, 2)
    metrics = {one.name: Metric(one.label, *one[3:7]) for one in columns}
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

    draw: Draw = lambda kept: figures(kept.facts["result"])
    return Pictures(stage, draw, kind=kind, read=collect_values)

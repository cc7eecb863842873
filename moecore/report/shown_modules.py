"""Users' modules with a typed result and SHOWN: results become values, until 0.4."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.config import Config
from moecore.core.encoded_arrays import encode_exact
from moecore.measure.base import Estimate, MeasuredPart, Skipped, read_result
from moecore.measure.values import Found, Metric, OnPage, Value
from moecore.report.measures.result_display import Draw, Figures, Pictures
from moecore.report.page.view import Block
from moecore.report.typed_results import Measured, Phase


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
    limits: str = "bootstrap"
    detail: bool = False
    is_fixed: bool = False


def show_typed_result(
    stage: str,
    title: str,
    result: type[Config],
    columns: Sequence[Column] = (),
    figures: Draw = lambda result: iter(()),
    part: Callable[[Phase], Iterable[Block]] | None = None,
    place: int = 100,
) -> Pictures:
    """Return the page of a typed result, and warn. ``part`` sees results of their own type."""
    instead = "declare metrics and put values (docs/tutorials/own_measurement.md)"
    warnings.warn(f"{stage}: SHOWN is read until 0.4; {instead}", DeprecationWarning, 2)
    metrics = {
        one.name: Metric(
            *(one.label, one.better, one.form, one.note, one.paper),
            detail=one.detail,
            limits=one.limits,
            is_fixed=one.is_fixed,
        )
        for one in columns
    }
    fields = {"metrics": metrics, "page": OnPage(title, place)}
    kind = type(MeasuredPart)(stage, (MeasuredPart,), fields)

    def read(path: Path, of_stage: str) -> Found | Skipped:
        typed = read_result(path, result, of_stage)
        if isinstance(typed, Skipped):
            return typed
        values = [value for column in columns for value in column_values(column, typed)]
        return Found(values=values, facts={"result": typed})

    def with_typed(model: Measured) -> Measured:
        kept = model.of(kind)
        typed = {} if kept is None else {result: kept.facts["result"]}
        return model._replace(results={**model.results, **typed})

    def more(phase: Phase) -> Iterable[Block]:
        models = {
            method: {seed: with_typed(model) for seed, model in seeds.items()}
            for method, seeds in phase.models.items()
        }
        return part(phase._replace(models=models)) if part else ()

    def draw(kept: Found) -> Figures:
        yield from figures(kept.facts["result"])

    return Pictures(stage, draw, part is None, more=more, kind=kind, read=read)


def column_values(column: Column, result: Config) -> list[Value]:
    """Return the value that a column reads; [] for none."""
    if (number := column.read(result)) is None:
        return []
    limits = number.model_dump() if isinstance(number, Estimate) else {"value": number}
    items = column.items(result)
    packed = None if items is None else encode_exact(np.asarray(items, float))
    return [Value(metric=column.name, items=packed, **limits)]

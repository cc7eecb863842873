"""What no single section of params.yaml can know: whether the sections fit each other."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from moecore.core.sources import FAMILIES
from moecore.study.document import Document
from moecore.study.label_rules import label_rules
from moecore.study.method_rules import method_rules
from moecore.study.problems import line_of
from moecore.study.selection_rules import selection_rules
from moecore.study.study import Study
from moecore.study.training_rules import schedule_rules
from moecore.study.volume_rules import volume_rules

Found = Iterator[tuple[tuple, str]]  # (keys, what is wrong)


def cross_checks(document: Document, study: Study | None) -> Iterator[str]:
    """One line per misfit, with file, line and column; study: None where the file was refused."""
    for keys, text in _misfits(document, study):
        yield line_of(document, keys, text)


HUGE = {int: 10**15, float: 1e100}


def not_finite(document: Document) -> Iterator[str]:
    """One line per number that is infinite, no number, or beyond HUGE: no setting may be one."""
    for keys, value in _numbers(document.data):
        if isinstance(value, int) or math.isfinite(value):
            most = HUGE[type(value)]
            if abs(value) > most:
                # An integer may be beyond every float, and beyond what Python would spell.
                small = isinstance(value, float) or abs(value) < 10**308
                shown = f"{value:.3g}" if small else "a number beyond 1e+308"
                text = f"found {shown}; allowed: numbers up to {most:.0e}"
                yield line_of(document, keys, text)
        else:
            found = "nan" if math.isnan(value) else f"{'-' * (value < 0)}inf"
            text = f"found .{found}; allowed: a finite number".replace(".-", "-.")
            yield line_of(document, keys, text)


def _numbers(value: Any, keys: tuple = ()) -> Iterator[tuple[tuple, float]]:
    """Every number inside ``value`` with its keys."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield keys, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, (*keys, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, (*keys, index))


def _misfits(document: Document, study: Study | None) -> Found:
    yield from selection_rules(document.data)
    if study is not None:
        yield from method_rules(study)
        yield from label_rules(study)
        yield from volume_rules(study)
        yield from schedule_rules(study)
        yield from _unwritten(study, document)


def _unwritten(study: Study, document: Document) -> Found:
    """Parts whose ``kind`` does not stand in the file.

    The hashes of the code that a method uses go by what is written.
    """
    for keys, settings in _settings(study):
        family = "/".join(type(settings).__module__.split(".")[1:-1])
        is_part = family in FAMILIES and "kind" in type(settings).model_fields
        if is_part and not _written((*keys, "kind"), document.data):
            kind = f"write kind: {settings.kind}"
            yield (
                keys,
                f"kind is not written; {kind}, so that a change of that part's code is noticed",
            )


def _settings(value: Any, keys: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every settings object inside ``value`` with its keys."""
    if isinstance(value, BaseModel):
        yield keys, value
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _settings(inner, (*keys, name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _settings(inner, (*keys, index))


def _written(keys: tuple, data: Any) -> bool:
    for key in keys:
        if isinstance(data, dict) and key in data:
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return False
    return True

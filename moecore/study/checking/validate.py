"""The whole of params.yaml, checked at once: every problem with its file, line, column and key."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from moecore.core.config import KIND, Part, part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.outside_packages import DOTTED_NAME
from moecore.measure.base import Measurement
from moecore.study.check import selection_misfits
from moecore.study.data_rules import volume_misfits
from moecore.study.document import Document, cap_line_count
from moecore.study.method_rules import idle_setting_misfits, method_misfits
from moecore.study.settings import describe_field, format_error_line
from moecore.study.study import (
    OPTIONAL_SECTIONS,
    REDUCING_PHASES,
    SECTIONS,
    TRAINING_PHASES,
    Misfits,
    Study,
    read_study,
    stage_by_section,
    study_model,
)
from moecore.study.training_rules import idle_view_misfits, label_misfits, schedule_misfits

LINE_PLACE = re.compile(r"(.*?):(\d+):(\d+): ")
LARGEST_NUMBERS = {int: 10**15, float: 1e100}  # no setting is larger


def check_document(document: Document, stages: Sequence[str]) -> Study:
    """Validate a whole params.yaml for these stages; raises UserError with one line per problem."""
    study, problems = read_study_and_problems(document, stages)
    if study is None or problems:
        raise UserError(cap_line_count(problems))
    return study


def read_study_and_problems(
    document: Document, stages: Sequence[str]
) -> tuple[Study | None, list[str]]:
    """Return the study, None where its sections cannot be read, and a line for each problem.

    The lines are in the order of the file.
    """
    study, problems = None, []
    try:
        study = read_study(document)
    except UserError as error:
        problems = str(error).split("\n")
    if stages and isinstance(document.data, dict):
        problems += format_misfits(document, _sections(document.data, stages))
    problems += format_misfits(document, cross_misfits(document.data, study))
    endless = format_misfits(document, _numbers_out_of_range(document.data))
    known = {_position(line) for line in endless}
    problems = endless + [line for line in problems if _position(line) not in known]
    return study, sorted(dict.fromkeys(problems), key=_position)


def format_misfits(document: Document, misfits: Iterable[tuple[tuple, str]]) -> list[str]:
    """Return one line per misfit, with file, line, column and key."""
    return [format_error_line(document, keys, text) for keys, text in misfits]


def params_schema() -> dict[str, Any]:
    """Return the JSON schema of a params.yaml, for editors, with the parts of allowed packages."""
    every = part_classes_by_kind(Measurement, imports=True)
    outside = {name: part for name, part in every.items() if DOTTED_NAME.fullmatch(name)}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft} | study_model(outside).model_json_schema()


def cross_misfits(data: Any, study: Study | None) -> Misfits:
    """Yield what in two sections does not fit together."""
    yield from selection_misfits(data)
    if study is not None:
        yield from method_misfits(study)
        yield from label_misfits(study)
        yield from volume_misfits(study)
        yield from schedule_misfits(study)
        yield from idle_view_misfits(study)
        yield from idle_setting_misfits(study)
        yield from _unwritten_kinds(study, data)


def _sections(data: dict[str, Any], stages: Sequence[str]) -> Misfits:
    """Sections that a stage reads and the file has not, and sections that no stage reads."""
    run = data["run"] if isinstance(data.get("run"), dict) else {}
    readers = stage_by_section(stages, run)
    for key, stage in readers.items():
        if key in OPTIONAL_SECTIONS or data.get(key) is not None or key not in Study.model_fields:
            continue
        if key in ("run", "data") and key not in data:
            continue  # the model itself says so
        lack = "found null" if key in data else f"missing; the stage {stage} reads it"
        yield (key,), f"{lack}; allowed: {describe_field(Study, (key,))}"
    measured = set(Study.model_fields) - {key for keys in SECTIONS.values() for key in keys}
    # Measurements may be switched off and keep their section
    welcome = {*readers, *OPTIONAL_SECTIONS, *(measured if "measure" in stages else ())}
    for key in data:
        if key in Study.model_fields and key not in welcome:
            yield (key,), f"no stage of dvc.yaml reads it; allowed: {', '.join(readers)}"
    # dvc.yaml's matrix of measurements is read from the file, where defaults do not count
    for key in ("measurements", "thorough") if "measure" in stages else ():
        if key not in run:
            text = "missing; the stage measure of dvc.yaml goes by it; allowed: a list"
            yield ("run", key), text
    sources = data.get("data")
    if not isinstance(sources, dict):
        return
    for phase in (*TRAINING_PHASES, *REDUCING_PHASES):
        if phase in stages and phase not in sources:
            there = ", ".join(sources)
            text = f"missing; the stage {phase} works on it; data has: {there}"
            yield ("data", phase), text


def _numbers_out_of_range(value: Any, keys: tuple = ()) -> Misfits:
    """Numbers that are infinite, no number, or beyond MOST: no setting may be one."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers_out_of_range(one, (*keys, key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield keys, f"found {'.nan' if math.isnan(value) else value}; allowed: a finite number"
    elif type(value) in LARGEST_NUMBERS and abs(value) > LARGEST_NUMBERS[type(value)]:
        # An integer may be beyond every float
        shown = f"{value:.3g}" if abs(value) < 10**308 else "a number beyond 1e+308"
        yield keys, f"found {shown}; allowed: numbers up to {LARGEST_NUMBERS[type(value)]:.0e}"


def _unwritten_kinds(study: Study, data: Any) -> Misfits:
    """Parts whose ``kind`` does not stand in the file: hashes of code go by what is written."""
    for keys, settings, written in _settings(study, data):
        if isinstance(settings, Part) and KIND not in written:
            text = f"add `kind: {settings.kind}`: a default is not tracked, so DVC would miss "
            yield keys, f"{text}changes of that part"


def _settings(value: Any, data: Any, keys: tuple = ()) -> Iterator[tuple[tuple, Any, Any]]:
    """Every settings object inside ``value`` with its keys, and what the file has there."""
    if isinstance(data, list):
        data = dict(enumerate(data))
    written = data if isinstance(data, dict) else {}
    if isinstance(value, BaseModel):
        yield keys, value, written
        value = dict(value)
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _settings(inner, written.get(name), (*keys, name))


def _position(problem: str) -> tuple[str, int, int]:
    match = LINE_PLACE.match(problem)
    return (match[1], int(match[2]), int(match[3])) if match else ("", 0, 0)

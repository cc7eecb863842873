"""The whole of params.yaml, checked at once: every problem with its file, line, column and key."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.study.checks import cross_checks, not_finite
from moecore.study.document import Document, load
from moecore.study.mistakes import cut
from moecore.study.overlay import stages_of
from moecore.study.params import validate_whole
from moecore.study.problems import line_of
from moecore.study.slots import Slot, describe
from moecore.study.study import OPTIONAL, PHASES, SECTIONS, Study, needed

PLACE = re.compile(r"(.*?):(\d+):(\d+): ")


def check(path: str | Path = "params.yaml") -> Study:
    """Validate the whole file for the stages of the dvc.yaml beside it.

    Raises UserError with one line per problem.
    """
    return check_document(load(str(path)), stages_of(Path(path).parent))


def check_document(document: Document, stages: Sequence[str]) -> Study:
    """Validate a whole params.yaml for these stages; raises UserError with one line per problem."""
    study, problems = looked_through(document, stages)
    if study is None or problems:
        raise UserError(cut(problems))
    return study


def looked_through(document: Document, stages: Sequence[str]) -> tuple[Study | None, list[str]]:
    """The study, None where its sections cannot be read, and a line for each problem of the file.

    The lines are in the order of the file.
    """
    study, problems = None, []
    try:
        study = validate_whole(Study, document)
    except UserError as error:
        problems = str(error).split("\n")
    if stages and isinstance(document.data, dict):
        problems += _sections(document, stages)
    problems += cross_checks(document, study)
    endless = list(not_finite(document))
    known = {_place(line) for line in endless}
    problems = endless + [line for line in problems if _place(line) not in known]
    return study, sorted(dict.fromkeys(problems), key=_line)


def schema() -> dict[str, Any]:
    """The JSON schema of every params.yaml, for editors."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft} | Study.model_json_schema()


def _sections(document: Document, stages: Sequence[str]) -> Iterator[str]:
    """Sections that a stage reads and the file has not, and sections that no stage reads."""
    data = document.data
    run = data["run"] if isinstance(data.get("run"), dict) else {}
    readers = needed(stages, run)
    for key, stage in readers.items():
        if key in OPTIONAL or data.get(key) is not None or key not in Study.model_fields:
            continue
        if key in ("run", "data") and key not in data:
            continue  # the model itself says so
        found = "found null" if key in data else f"missing; the stage {stage} reads it"
        yield f"{document.place([key])}: {key}: {found}; allowed: {_allowed(key)}"
    for key in data:
        if key in Study.model_fields and key not in _welcome(readers, stages):
            text = f"no stage of dvc.yaml reads it; allowed: {', '.join(readers)}"
            yield line_of(document, [key], text)
    yield from _run_keys(document, stages, run)
    yield from _data(document, stages)


def _welcome(readers: dict[str, str], stages: Sequence[str]) -> set[str]:
    """Sections that may be there: those that are read, and measurements that are switched off."""
    measured = set(Study.model_fields) - {key for keys in SECTIONS.values() for key in keys}
    return set(readers) | set(OPTIONAL) | (measured if "measure" in stages else set())


def _run_keys(document: Document, stages: Sequence[str], run: dict[str, Any]) -> Iterator[str]:
    """dvc.yaml's matrix of measurements is read from the file, where defaults do not count."""
    for key in ("measurements", "thorough") if "measure" in stages else ():
        if key not in run:
            place = document.place(["run"])
            text = "missing; the stage measure of dvc.yaml goes by it; allowed: a list"
            yield f"{place}: run.{key}: {text}"


def _data(document: Document, stages: Sequence[str]) -> Iterator[str]:
    data = document.data.get("data")
    for phase in PHASES:
        if phase in stages and isinstance(data, dict) and phase not in data:
            place = document.place(["data"])
            found = f"missing; the stage {phase} trains on it"
            yield f"{place}: data.{phase}: {found}; data has: {', '.join(map(str, data))}"


def _allowed(key: str) -> str:
    return describe(Slot.of(Study.model_fields[key])).removesuffix(" or null")


def _place(problem: str) -> str:
    found = PLACE.match(problem)
    return found[0] if found else problem


def _line(problem: str) -> tuple[str, int, int]:
    found = PLACE.match(problem)
    return (found[1], int(found[2]), int(found[3])) if found else ("", 0, 0)

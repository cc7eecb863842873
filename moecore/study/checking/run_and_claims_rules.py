"""``run``, ``claims`` and ``questions`` against the sections that they name.

On the raw data, so that these problems show beside all others, also where a section is refused.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args

from moecore.core.config import find_class
from moecore.core.outside_packages import DOTTED_NAME
from moecore.measure.base import Measurement
from moecore.study.document import did_you_mean
from moecore.study.sections import Phase
from moecore.study.study import MEASURED_SECTIONS, Misfits

PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")


def selection_misfits(data: Any) -> Misfits:
    """Yield what ``run`` and ``claims`` name and the file has not."""
    whole = _as_mapping(data)
    run = _as_mapping(whole.get("run"))
    methods = list(_as_mapping(whole.get("methods")))
    for key, known in (("methods", methods), ("measurements", MEASURED_SECTIONS)):
        allowed = ", ".join(map(str, known)) or f"nothing, {key} is empty"
        for index, name in enumerate(_as_list(run.get(key))):
            if key == "measurements" and isinstance(name, str) and DOTTED_NAME.fullmatch(name):
                for text in _outside_measurement_problems(whole, name):
                    yield ("run", key, index), text
            elif isinstance(name, str) and name not in known:
                text = f"found {name!r}{did_you_mean(name, known)}; allowed: {allowed}"
                yield ("run", key, index), text
    yield from _repeated_entries(run)
    yield from _claims(whole, run)
    yield from _repeated_claims(whole)
    for name in methods:
        if not PLAIN_NAME.fullmatch(name):
            allowed = "up to 100 small letters, digits and _, a letter first (it becomes a folder)"
            yield ("methods", name), f"found the name {name!r}; allowed: {allowed}"
    yield from _phases(whole, run)


def _outside_measurement_problems(whole: dict, name: str) -> Iterator[str]:
    """Yield why a measurement from outside cannot be run."""
    package, _, module = name.partition(".")
    if "." in module:
        yield f"found {name!r}; allowed: package.module"
    elif module not in _as_mapping(whole.get(package)):
        yield f"{name} has no settings; write {package}: {{{module}: {{}}}} (all as by default)"
    else:
        try:
            find_class(Measurement, name)
        except ValueError as error:
            yield str(error)


def _repeated_entries(run: dict) -> Misfits:
    for key in ("methods", "seeds", "phases", "measurements"):
        before: set[str] = set()
        for index, value in enumerate(_as_list(run.get(key))):
            if repr(value) in before:
                yield ("run", key, index), f"{value!r} is there twice; keep one"
            if key == "seeds" and isinstance(value, int) and value < 0:
                yield ("run", key, index), f"found {value}; allowed: integers ≥ 0"
            before.add(repr(value))


def _claims(whole: dict, run: dict) -> Misfits:
    # What run leaves out of these, such claims wait for.
    methods = list(_as_mapping(whole.get("methods")))
    phases = [phase for phase in get_args(Phase) if phase in whole]
    known_by_key = {"method": methods, "against": methods, "phase": phases}
    asked = [
        (section, index, _as_mapping(one))
        for section in ("claims", "questions")
        for index, one in enumerate(_as_list(whole.get(section)))
    ]
    for section, index, one in asked:
        for key, allowed in known_by_key.items():
            value = one.get(key)
            if isinstance(value, str) and value not in allowed:
                known = ", ".join(map(str, allowed))
                text = f"found {value!r}{did_you_mean(value, allowed)}; allowed: {known}"
                yield (section, index, key), text
        same = one.get("method") is not None and one.get("method") == one.get("against")
        if same and not one.get("against_metric"):
            others = ", ".join(map(str, _as_list(run.get("methods"))))
            allowed = f"another of {others}, or the same with against_metric"
            text = f"found {one['against']!r}, the method itself; allowed: {allowed}"
            yield (section, index, "against"), text


def _repeated_claims(whole: dict) -> Misfits:
    """Claims of one paper about the same two numbers, also where the two are turned round."""
    first: dict[str, int] = {}
    for index, one in enumerate(map(_as_mapping, _as_list(whole.get("claims")))):
        metric, phase = one.get("metric"), one.get("phase", "pretrain")
        ours = [metric, one.get("method")]
        theirs = [one.get("against_metric") or metric, one.get("against")]
        fact = repr((one.get("paper"), phase, sorted([ours, theirs], key=repr)))
        if (same := first.setdefault(fact, index)) != index:
            text = f"found the two numbers of claims[{same}]; allowed: each fact once"
            yield ("claims", index, "metric"), text


def _phases(whole: dict, run: dict) -> Misfits:
    """``run.phases`` against the sections that such a phase needs."""
    if run.get("methods") == [] and "pretrain" in whole:
        yield ("run", "methods"), "found none, but there is pretrain; allowed: entries of methods"
    for index, phase in enumerate(_as_list(run.get("phases"))):
        if phase not in get_args(Phase):
            continue
        there = {phase: phase in whole, f"data.{phase}": phase in _as_mapping(whole.get("data"))}
        lacking = [name for name in sorted(there) if not there[name]]
        if lacking:
            text = f"needs {' and '.join(lacking)}; add what lacks, or leave the phase out"
            yield ("run", "phases", index), text


def _as_mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else []

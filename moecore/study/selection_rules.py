"""``run``, ``claims`` and ``questions`` against the sections that they name.

On the raw data, so that these problems show beside all others, also where a section is refused.
"""

import re
from collections.abc import Hashable, Iterator
from typing import Any, get_args

from moecore.study.document import near
from moecore.study.problems import unlisted
from moecore.study.selection import Phase
from moecore.study.study import MEASURED

Found = Iterator[tuple[tuple, str]]  # (keys, what is wrong)

NAME = re.compile(r"[a-z][a-z0-9_]*")
LONGEST = 100  # characters of a name


def selection_rules(data: Any) -> Found:
    """What ``run`` and ``claims`` name and the file has not."""
    whole = _mapping(data)
    run = _mapping(whole.get("run"))
    methods = list(_mapping(whole.get("methods")))
    yield from _methods(run, methods)
    yield from _measurements(run)
    yield from _claims(whole, run)
    yield from _once(run)
    yield from _names(methods)
    yield from _phases(whole, run)


def _methods(run: dict, methods: list) -> Found:
    known = ", ".join(map(str, methods)) or "nothing, methods is empty"
    for index, name in enumerate(_list(run.get("methods"))):
        if isinstance(name, str) and name not in methods:
            hint = near(name, methods)
            yield ("run", "methods", index), f"found {name!r}{hint}; allowed: {known}"


def _measurements(run: dict) -> Found:
    for index, name in enumerate(_list(run.get("measurements"))):
        if isinstance(name, str) and name not in MEASURED:
            hint = unlisted(name, "moecore/measure") or near(name, MEASURED)
            text = f"found {name!r}{hint}; allowed: {', '.join(MEASURED)}"
            yield ("run", "measurements", index), text


def _claims(whole: dict, run: dict) -> Found:
    # What run leaves out of these, such claims wait for.
    methods = list(_mapping(whole.get("methods")))
    phases = [phase for phase in get_args(Phase) if phase in whole]
    known_by_key = {"method": methods, "against": methods, "phase": phases}
    asked = [(key, index) for key in ("claims", "questions") for index in _places(whole.get(key))]
    for section, index in asked:
        one = _mapping(whole[section][index])
        for key, allowed in known_by_key.items():
            found = one.get(key)
            if isinstance(found, str) and found not in allowed:
                known = ", ".join(map(str, allowed))
                text = f"found {found!r}{near(found, allowed)}; allowed: {known}"
                yield (section, index, key), text
        same = one.get("method") is not None and one.get("method") == one.get("against")
        if same and not one.get("against_metric"):
            others = ", ".join(map(str, _list(run.get("methods"))))
            allowed = f"another of {others}, or the same with against_metric"
            text = f"found {one['against']!r}, the method itself; allowed: {allowed}"
            yield (section, index, "against"), text


def _once(run: dict) -> Found:
    for key in ("methods", "seeds", "phases", "measurements"):
        values = _list(run.get(key))
        before: set[Any] = set()
        for index, value in enumerate(values):
            # Lists and mappings, which no set takes, are refused by their type.
            known = value if isinstance(value, Hashable) else repr(value)
            if known in before:
                yield ("run", key, index), f"{value!r} is there twice; keep one"
            if key == "seeds" and isinstance(value, int) and value < 0:
                yield ("run", key, index), f"found {value}; allowed: integers ≥ 0"
            before.add(known)


def _names(methods: list) -> Found:
    for name in methods:
        if not NAME.fullmatch(str(name)):
            allowed = "small letters, digits and _, beginning with a letter (it becomes a folder)"
            yield ("methods", name), f"found the name {str(name)!r}; allowed: {allowed}"
        elif len(str(name)) > LONGEST:
            found = f"found a name of {len(str(name))} characters"
            yield ("methods", name), f"{found}; allowed: up to {LONGEST} (it becomes a folder)"


def _phases(whole: dict, run: dict) -> Found:
    """``run.phases`` against the sections that such a phase needs."""
    if run.get("methods") == [] and "pretrain" in whole:
        yield ("run", "methods"), "found none, but there is pretrain; allowed: entries of methods"
    for index, phase in enumerate(_list(run.get("phases"))):
        if phase not in get_args(Phase):
            continue
        there = {str(phase): phase in whole, f"data.{phase}": phase in _mapping(whole.get("data"))}
        lacking = [name for name in sorted(there) if not there[name]]
        if lacking:
            text = f"needs {' and '.join(lacking)}; add what lacks, or leave the phase out"
            yield ("run", "phases", index), text


def _mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _places(value: Any) -> range:
    return range(len(_list(value)))


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []

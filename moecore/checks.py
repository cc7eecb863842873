"""What no single section of params.yaml can know: whether the sections fit each other."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from moecore.checks_cohort import cohort_checks
from moecore.files import StageError
from moecore.problems import spell
from moecore.selection import Phase
from moecore.sources import FAMILIES
from moecore.yaml12 import Document, near

NAME = re.compile(r"[a-z][a-z0-9_]*")
NO_TEACHER = "no_teacher"
WANTED = {
    "routing": "a router", "load": "a router that provides load probabilities", "guidance": "a teacher",
    "basis": "experts or a router that have bases (eigen, eigenbasis)",
}  # fmt: skip


def cross_checks(document: Document, study: Any) -> Iterator[str]:
    """One line per misfit, with file, line and column. ``study``: the validated file, or None where it was refused."""
    of_study = (*_needs(study), *_sizes(study), *_several_labels(study), *cohort_checks(study), *_unwritten(study, document)) if study else ()
    for keys, text in (*_selection(document.data), *_phases(document.data), *of_study):
        yield f"{document.place(keys)}: {spell(keys)}: {text}"


def _selection(data: Any) -> Iterator[tuple[tuple, str]]:
    """``run`` against ``methods``, on the raw data, so that these problems show beside all others."""
    run, methods = (_mapping(_mapping(data).get(key)) for key in ("run", "methods"))
    for index, name in enumerate(_list(run.get("methods"))):
        if isinstance(name, str) and name not in methods:
            yield ("run", "methods", index), f"found {name!r}{near(name, list(methods))}; allowed: {', '.join(map(str, methods)) or 'nothing, methods is empty'}"
    for index, claim in enumerate(_list(_mapping(data).get("claims"))):
        for key, allowed in (("method", run.get("methods")), ("against", run.get("methods")), ("phase", run.get("phases"))):
            found = _mapping(claim).get(key)
            if isinstance(found, str) and found not in _list(allowed):
                yield ("claims", index, key), f"found {found!r}{near(found, _list(allowed))}; allowed: {', '.join(map(str, _list(allowed)))}, as in run"
    for key in ("methods", "seeds", "phases"):
        values = _list(run.get(key))
        for index, value in enumerate(values):
            if value in values[:index]:
                yield ("run", key, index), f"{value!r} is there twice; keep one"
            if key == "seeds" and isinstance(value, int) and value < 0:
                yield ("run", key, index), f"found {value}; allowed: integers ≥ 0"
    for name in methods:
        if not NAME.fullmatch(str(name)):
            yield ("methods", name), f"found the name {str(name)!r}; allowed: small letters, digits and _, beginning with a letter (it becomes a folder)"


def _phases(data: Any) -> Iterator[tuple[tuple, str]]:
    """``run.phases`` against the sections that such a phase needs."""
    whole = _mapping(data)
    for index, phase in enumerate(_list(_mapping(whole.get("run")).get("phases"))):
        sections = {f"data.{phase}": _mapping(whole.get("data")), str(phase): whole}
        lacking = [name for name, section in sections.items() if phase not in section]
        if phase in get_args(Phase) and lacking:
            yield ("run", "phases", index), f"needs {' and '.join(lacking)}; add what lacks, or leave the phase out"


def _sizes(study: Any) -> Iterator[tuple[tuple, str]]:
    """Whether the section ``model`` takes what a method changes of it."""
    for name, method in getattr(study, "methods", {}).items():
        try:
            method.sized(study.model)
        except StageError as error:
            yield ("methods", name, "model"), str(error)


def _needs(study: Any) -> Iterator[tuple[tuple, str]]:
    """Whether every regularizer finds what it needs."""
    teacher = getattr(study, "teacher", None)
    for name, method in getattr(study, "methods", {}).items():
        yield from _teacher_keys(study, name, method)
        yield from _same_views(study, name, method)
        for index, regularizer in enumerate(method.regularizers):
            for need in sorted(regularizer.needs & set(WANTED)):
                place = ("methods", name, "regularizers", index)
                if need != "guidance" and need not in method.provided:
                    yield place, f"{regularizer.kind} needs {WANTED[need]}, but {_router(method)}"
                elif need == "guidance" and teacher is not None and teacher.kind == NO_TEACHER and name in study.run.methods:
                    yield place, f"{regularizer.kind} needs a teacher, but teacher.kind is {teacher.kind}; allowed: {', '.join(_teachers(study))}"


def _teacher_keys(study: Any, name: str, method: Any) -> Iterator[tuple[tuple, str]]:
    """What of a method asks for a teacher where the study has none."""
    teacher = getattr(study, "teacher", None)
    if teacher is None or teacher.kind != NO_TEACHER or name not in study.run.methods:
        return
    asking = {"distillation": method.distillation > 0, "upcycle": method.upcycle, "router": method.routed_by_teacher}
    for key in (key for key, asks in asking.items() if asks):
        yield ("methods", name, key), f"needs a teacher, but teacher.kind is {teacher.kind}; allowed: {', '.join(_teachers(study))}"


def _same_views(study: Any, name: str, method: Any) -> Iterator[tuple[tuple, str]]:
    """Two views of an image that are always the same teach a router nothing."""
    training = getattr(study, "pretrain", None)
    if method.views == 2 and name in study.run.methods and training is not None and training.views == type(training.views)():
        kind = next(loss.kind for loss in method.regularizers if "two_views" in loss.needs)
        yield ("methods", name, "regularizers"), f"{kind} compares two views of an image, but pretrain.views changes nothing; give it a crop, shift or flip"


def _several_labels(study: Any) -> Iterator[tuple[tuple, str]]:
    """What has no meaning for images with several labels each: shares of a label, one decision of a teacher, one temperature."""
    sets = {phase for phase, source in getattr(study, "data", {}).items() if getattr(source, "multi_label", False)}
    sections = {(phase,): (phase, getattr(study, phase, None)) for phase in ("pretrain", "finetune", "adversarial")}
    sections[("teacher", "training")] = ("pretrain", getattr(getattr(study, "teacher", None), "training", None))
    for keys, (phase, training) in sections.items():
        for key in ("mix", "label_smoothing", "shots") if phase in sets and training is not None else ():
            if found := getattr(training, key, None):
                allowed = 0 if key == "label_smoothing" else "null"
                yield (*keys, key), f"found {found}, but the images of data.{phase} have several labels each; allowed: {allowed}"
    for name, method in getattr(study, "methods", {}).items() if "pretrain" in sets else ():
        if method.distillation and name in study.run.methods:
            yield ("methods", name, "distillation"), "one decision of a teacher cannot be learned where images have several labels each; allowed: 0"
    for index, phase in enumerate(study.run.phases if hasattr(study, "calibrate") else ()):
        if phase in sets:
            yield ("run", "phases", index), f"data.{phase} has several labels for each image, which calibrate does not take; leave out the phase or the stage"


def _router(method: Any) -> str:
    if method.router is None:
        return "the method has no router"
    return f"{method.router.kind} provides {', '.join(sorted(method.provided)) or 'nothing'}"


def _teachers(study: Any) -> list[str]:
    union = type(study).model_fields["teacher"].annotation
    return [kind for member in get_args(union) for kind in get_args(member.model_fields["kind"].annotation) if kind != NO_TEACHER]


def _unwritten(study: Any, document: Document) -> Iterator[tuple[tuple, str]]:
    """Parts whose ``kind`` does not stand in the file: the hashes of the code that a method uses go by what is written."""
    for keys, settings in _settings(study):
        family = type(settings).__module__.split(".")[1:2]
        if family and family[0] in FAMILIES and "kind" in type(settings).model_fields and not _written((*keys, "kind"), document.data):
            yield keys, f"kind is not written; write kind: {settings.kind}, so that a change of that part's code is noticed"


def _settings(value: Any, keys: tuple = ()) -> Iterator[tuple[tuple, BaseModel]]:
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
        if isinstance(data, dict) and key in data or isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return False
    return True


def _mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []

"""What the parts of each family must have, so that a part that lacks it is named, and what.

A part is looked at as a class, before any setting is read: file, class, what is missing, and what
it may be.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic_core import PydanticUndefined

from moecore.core.config import Config
from moecore.study.mistakes import file_of, shown

Words = tuple[str, ...]


class Contract(NamedTuple):
    """What every part of a family has beside ``kind``."""

    calls: Mapping[str, Words] = {}  # method → the words it is called with
    fields: Mapping[str, str] = {}  # setting → how it is written
    values: Mapping[str, str] = {}  # attribute or property → how it is written
    words: Mapping[str, frozenset[str]] = {}  # attribute → what may be in it
    without: Words = ()  # kinds that are asked for nothing of this


NEEDS = frozenset({"routing", "load", "guidance", "basis", "two_views"})
SET = "frozenset[str]"
SEED = {"seed": "seed: int = Field(0, ge=0)"}

CONTRACTS = {
    "tasks": Contract(
        calls={
            "predict": ("output",),
            "loss": ("prediction", "labels", "label_smoothing", "reduction"),
            "drawn": ("labels", "draws"),
            "among": ("labels",),
            "attack_loss": ("prediction", "labels"),
            "test_loss": ("prediction", "labels"),
            "scores": ("prediction", "labels"),
            "top5": ("prediction", "labels"),
            "running": ("prediction", "labels", "learned"),
            "mean_score": ("prediction", "labels"),
            "interval": ("scores", "people"),
            "worst": ("one", "other"),
            "difference": ("one", "other", "level", "people"),
            "guess": ("labels",),
            "details": ("prediction", "labels", "train_labels"),
            "packed": ("scores",),
            "unpacked": ("kept", "images"),
            "by_class": ("labels",),
            "counts": ("labels",),
            "stored": ("images",),
            "check": ("labels", "what"),
            "needs_classes": ("what",),
        },
        values={
            name: f"a property {name}"
            for name in ("outputs", "answers", "score", "logged", "long", "head", "classes")
        },
    ),
    "nn/routers": Contract(
        calls={
            "build": ("width", "experts", "basis"),
            "with_k": ("k",),
            "finetuned": (),
            "active": ("experts",),
        },
        values={"provides": f"a property, {SET}", "wants": f"a property, {SET}"},
    ),
    "nn/experts": Contract(
        calls={"build": ("width",)},
        fields={"number": "number: int = Field(default=8, ge=2)"},
        values={"provides": f"provides: ClassVar[{SET}] = frozenset()"},
    ),
    "nn/backbones": Contract(
        calls={"build": ("image", "moe"), "grid": ("image",)},
        values={"depth": "depth: int, the number of blocks"},
    ),
    "data/sources": Contract(
        calls={"prepare": ("folder",)},
        fields=SEED,
        values={"task": "task: ClassVar[type[Classification]] = Classification, or another task"},
    ),
    "attacks": Contract(
        calls={
            "__call__": ("model", "task", "images", "labels", "epsilon", "generator"),
            "refuses": ("task",),
            "does_not_apply": ("model", "task"),
        },
        values={
            "name": "the property of AttackBase",
            "together": "the property of AttackBase",
            "climbs_task": "the property of AttackBase",
        },
    ),
    "training/regularizers": Contract(
        calls={"__call__": ("step",)},
        fields={"weight": "weight: float = Field(default=0.005, ge=0)"},
        values={"needs": f'needs: ClassVar[{SET}] = frozenset({{"routing"}})'},
        words={"needs": NEEDS},
    ),
    "training/teachers": Contract(
        calls={"build": ("image",)},
        fields={"training": "training: Training, or training: None = None"},
        without=("no_teacher",),
    ),
    "measure/calibrators": Contract(
        calls={"calibrates": ("task",)},
        values={
            "fit": "a method that gives the fitted calibrator",
            "needs_out_of_fold": "a property, bool",
        },
    ),
}
MEASUREMENT = {"applies": ("subject",), "measure": ("subject", "settings", "parts")}


def lacks(part: Any, family: str) -> Iterator[str]:
    """A line for each thing that ``part``, a class of ``family``, lacks of its contract."""
    if not (inspect.isclass(part) and issubclass(part, Config)):
        yield f"{_place(part)} is no settings; allowed: a class on moecore.core.config.Config"
        return
    contract = CONTRACTS[family]
    kind = part.model_fields.get("kind")
    stem = file_of(part).stem
    written = f'kind: Literal["{stem}"] = "{stem}"'
    if kind is None or not get_args(kind.annotation) or kind.default is PydanticUndefined:
        yield f"{_place(part)} lacks kind; allowed: {written}"
    elif kind.default != stem or stem not in get_args(kind.annotation):
        yield f"{_place(part)}: kind is {kind.default!r}; allowed: {written}, the file's name"
    if kind is not None and kind.default in contract.without:
        return
    for name, words in contract.calls.items():
        if why := takes(part, name, words):
            yield why
    for name, allowed in contract.fields.items():
        if name not in part.model_fields:
            yield f"{_place(part)} lacks {name}; allowed: {allowed}"
    for name, allowed in contract.values.items():
        if name not in part.model_fields and not hasattr(part, name):
            yield f"{_place(part)} lacks {name}; allowed: {allowed}"
    yield from _unknown_words(part, contract)


def lacks_of_measurement(measurement: Any) -> Iterator[str]:
    """The same for a measurement's two functions and its settings."""
    for name, words in MEASUREMENT.items():
        function = getattr(measurement, name)
        if why := _refusal(function, words):
            place = _place(function)
            yield f"{place} cannot be called as it is, {name}({', '.join(words)}): {why}"
    settings = measurement.settings
    if not (inspect.isclass(settings) and issubclass(settings, Config)):
        yield f"{_place(settings)} is no settings; allowed: a class on moecore.core.config.Config"


def takes(owner: type, name: str, words: Words) -> str | None:
    """Why the method ``name`` of a class cannot be called with as many words; None where it can."""
    # In its own classes: every class can be called itself, which is not what is asked for.
    there = any(name in vars(base) for base in owner.__mro__)
    function = getattr(owner, name) if there else None
    called = f"{name}({', '.join(words)})"
    if not callable(function):
        return f"{_place(owner)} lacks the method {name}; allowed: def {_signature(name, words)}"
    given = words if inspect.ismethod(function) else ("self", *words)
    if why := _refusal(function, given):
        found = f"{name}({', '.join(inspect.signature(function).parameters)})"
        allowed = f"def {_signature(name, words)}"
        return (
            f"{_place(owner)}: found {found}, but it is called {called}: {why}; allowed: {allowed}"
        )
    return None


def _signature(name: str, words: Words) -> str:
    return f"{name}({', '.join(('self', *words))})"


def _refusal(function: Any, words: Words) -> str | None:
    try:
        inspect.signature(function).bind(*words)
    except TypeError as error:
        return str(error)
    return None


def _unknown_words(part: type[Config], contract: Contract) -> Iterator[str]:
    for name, allowed in contract.words.items():
        found = getattr(part, name, None)
        if found is None:
            continue
        listed = ", ".join(sorted(allowed))
        if not isinstance(found, (set, frozenset)):
            yield f"{_place(part)}: {name} is {found!r}; allowed: a frozenset of {listed}"
        elif unknown := sorted(set(found) - allowed):
            yield f"{_place(part)}: {name} has {', '.join(unknown)}; allowed: {listed}"


def _place(part: Any) -> str:
    return f"{shown(file_of(part))}: {getattr(part, '__name__', repr(part))}"

"""Floor 0: what is wrong with a params.yaml, in the words of the person who wrote it.

pydantic's errors name Python types and tags of unions; here every problem is one line with file, line, column, key, what was
found and what is allowed, derived from the same annotations that refused it.
"""

import json
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from moecore.yaml12 import Document, near

WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "anything"}


class Slot(NamedTuple):
    """An annotation with what restricts it."""

    annotation: Any
    bounds: tuple = ()
    discriminator: str | None = None


def problems(
    error: ValidationError, model: type[BaseModel], places: Mapping[str, tuple[str, ...]], document: Document, absent: set[str] = frozenset()
) -> list[str]:
    """One line per problem, in the order of the file.

    places: where each field of ``model`` sits in the document (its own name where it is not given); absent: fields already reported.
    """
    lines: dict[tuple, str] = {}
    for item in error.errors(include_url=False):
        if item["loc"] and item["loc"][0] in absent:
            continue
        path, slot, owner = walk(Slot(model), item["loc"])
        keys = (*places.get(path[0], (path[0],)), *path[1:]) if path else ()
        place = document.place(keys)
        lines.setdefault((*map(int, place.rsplit(":", 2)[1:]), keys), f"{place}: {spell(keys)}: {_complaint(item, path, slot, owner)}")
    return [lines[key] for key in sorted(lines, key=lambda key: key[:2])]


def spell(keys: Sequence[str | int]) -> str:
    """``("a", 0, "b")`` as ``a[0].b``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".") or "(the whole file)"


def walk(slot: Slot, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], Slot, Slot]:
    """Follow a pydantic location: the keys as the file has them (no union tags), the type there, and the type that holds it."""
    slot, owner, path = resolve(slot), slot, []
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        if part == "[key]":
            break
        if slot.discriminator:
            slot = resolve(Slot(members(slot)[str(part)])) if str(part) in members(slot) else slot
            continue
        child = _child(slot.annotation, part)
        if child is None:  # a plain union or a validator's own marker: the problem is with the value as a whole
            if isinstance(slot.annotation, type) and issubclass(slot.annotation, BaseModel):
                owner, slot = slot, Slot(Any)
                path.append(part)
            break
        owner, slot = slot, resolve(child)
        path.append(part)
    return tuple(path), slot, owner


def resolve(slot: Slot) -> Slot:
    """Look through ``Annotated`` and ``X | None`` (None is recorded in the bounds)."""
    annotation, bounds, tag = slot
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        infos = [note for note in notes if isinstance(note, FieldInfo)]
        extra = [bound for info in infos for bound in info.metadata] + [note for note in notes if not isinstance(note, FieldInfo)]
        return resolve(Slot(inner, (*bounds, *extra), next((info.discriminator for info in infos if info.discriminator), tag)))
    if origin in (Union, types.UnionType) and type(None) in get_args(annotation):
        inner = tuple(member for member in get_args(annotation) if member is not type(None))
        return resolve(Slot(Union[inner], (*bounds, None), tag))  # noqa: UP007
    return slot


def members(slot: Slot) -> dict[str, type[BaseModel]]:
    """Tag → member of a discriminated union."""
    return {str(tag): member for member in get_args(slot.annotation) for tag in get_args(member.model_fields[slot.discriminator].annotation)}


def _child(annotation: Any, part: str | int) -> Slot | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return Slot(field.annotation, tuple(field.metadata), field.discriminator) if field else None
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return Slot(inner[1])
    if origin is tuple and isinstance(part, int):
        return Slot(inner[0] if len(inner) == 2 and inner[1] is ... else inner[min(part, len(inner) - 1)])
    if origin in (list, set, frozenset, Sequence) and isinstance(part, int):
        return Slot(inner[0])
    return None


def describe(slot: Slot) -> str:
    """What a value of this type may be: ``integer ≥ 1``, ``one of relu, gelu``, ``a list of numbers``."""
    annotation, bounds, tag = slot = resolve(slot)
    null = " or null" if None in bounds else ""
    origin, inner = get_origin(annotation), get_args(annotation)
    if tag:
        return f"keys with {tag}: {' | '.join(members(slot))}{null}"
    if origin is Literal:
        return (f"one of {', '.join(_bare(choice) for choice in inner)}" if len(inner) > 1 else _bare(inner[0])) + null
    if origin in (Union, types.UnionType):
        return " or ".join(describe(Slot(member)) for member in inner) + null
    if origin is dict:
        return f"keys ({describe(Slot(inner[0]))}), each with {describe(Slot(inner[1]))}{null}"
    if origin in (list, tuple, set, frozenset, Sequence):
        each = [describe(Slot(member)) for member in inner if member is not ...]
        fixed = origin is tuple and ... not in inner
        return (f"a list [{', '.join(each)}]" if fixed else f"a list of {each[0]}") + _limits(bounds) + null
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"the keys {', '.join(annotation.model_fields) or '(none)'}{null}"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _limits(bounds) + null


def _limits(bounds: Sequence[Any]) -> str:
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "multiple_of": "a multiple of {}", "pattern": "like {}",
             "min_length": "at least {} long", "max_length": "at most {} long"}  # fmt: skip
    stated = [sign.format(value) for bound in bounds for name, sign in signs.items() if (value := getattr(bound, name, None)) is not None]
    return " " + " and ".join(stated) if stated else ""


def _complaint(item: Any, path: tuple, slot: Slot, owner: Slot) -> str:
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        allowed = list(owner.annotation.model_fields)
        return f"unknown key{near(path[-1], allowed)}; allowed: {', '.join(allowed) or '(none)'}"
    if kind == "missing":
        return f"missing; allowed: {describe(slot)}"
    if kind in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"])
    if kind == "union_tag_not_found":
        return f"{slot.discriminator} is missing; allowed: {slot.discriminator}: {' | '.join(members(slot))}"
    if kind == "union_tag_invalid":
        found, known = item["ctx"]["tag"], list(members(slot))
        return f"found {slot.discriminator}: {found}{near(found, known)}; allowed: {', '.join(known)}"
    if item["loc"] and item["loc"][-1] == "[key]":
        name = Slot(get_args(owner.annotation)[0])
        return f"found the key {value!r}{near(value, get_args(name.annotation))}; allowed: {describe(name)}"
    hint = near(value, get_args(slot.annotation)) if kind == "literal_error" else ""
    return f"found {show(value)}{hint}; allowed: {describe(slot)}"


def show(value: Any) -> str:
    """A value with its type, as the file would spell it: ``'two' (str)``, ``true (bool)``, ``a list of 3``."""
    if isinstance(value, dict):
        return f"the keys {', '.join(map(str, value))}" if value else "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})" if value is not None else "null"


def _bare(choice: Any) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)

"""Annotations with what restricts them, and what they allow in words."""

import json
import types
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

WORDS = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "anything",
}
SIGNS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "multiple_of": "a multiple of {}",
    "pattern": "like {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
}
LISTS = (list, tuple, set, frozenset, Sequence)


class Slot(NamedTuple):
    """An annotation with what restricts it; None among the bounds says that it may be null."""

    annotation: Any
    bounds: tuple = ()
    discriminator: str | None = None

    @classmethod
    def of(cls, field: FieldInfo) -> "Slot":
        """The slot of a model's field."""
        return cls(field.annotation, tuple(field.metadata), _tag(field))


def resolve(slot: Slot) -> Slot:
    """Look through ``Annotated`` and ``X | None``, whose None moves into the bounds."""
    annotation, bounds, tag = slot
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        infos = [note for note in notes if isinstance(note, FieldInfo)]
        extra = [bound for info in infos for bound in info.metadata]
        extra += [note for note in notes if not isinstance(note, FieldInfo)]
        found = next((_tag(info) for info in infos if info.discriminator), tag)
        return resolve(Slot(inner, (*bounds, *extra), found))
    if origin in (Union, types.UnionType) and type(None) in get_args(annotation):
        inner = [member for member in get_args(annotation) if member is not type(None)]
        return resolve(Slot(reduce(or_, inner), (*bounds, None), tag))
    return slot


def members(slot: Slot) -> dict[str, type[BaseModel]]:
    """Tag → member of a discriminated union."""
    return {
        str(tag): member
        for member in get_args(slot.annotation)
        for tag in get_args(member.model_fields[slot.discriminator].annotation)
    }


def child(annotation: Any, part: str | int) -> Slot | None:
    """The slot of a model's field, of an entry of a mapping or list; None where there is none."""
    if is_model(annotation):
        field = annotation.model_fields.get(str(part))
        return Slot.of(field) if field else None
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return Slot(inner[1])
    if origin is tuple and isinstance(part, int):
        if len(inner) == 2 and inner[1] is ...:
            return Slot(inner[0])
        return Slot(inner[min(part, len(inner) - 1)])
    if origin in LISTS and isinstance(part, int):
        return Slot(inner[0])
    return None


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def describe(slot: Slot) -> str:
    """What a value of this type may be: ``integer ≥ 1``, ``one of relu, gelu``, …"""
    slot = resolve(slot)
    null = " or null" if None in slot.bounds else ""
    return _described(slot) + null


def _described(slot: Slot) -> str:
    annotation, bounds, tag = slot
    origin, inner = get_origin(annotation), get_args(annotation)
    if tag:
        return f"keys with {tag}: {' | '.join(members(slot))}"
    if origin is Literal:
        choices = ", ".join(_bare(choice) for choice in inner)
        return f"one of {choices}" if len(inner) > 1 else choices
    if origin in (Union, types.UnionType):
        return " or ".join(describe(Slot(member)) for member in inner)
    if origin is dict:
        return f"keys ({describe(Slot(inner[0]))}), each with {describe(Slot(inner[1]))}"
    if origin in LISTS:
        return _list(origin, inner) + _limits(bounds)
    if is_model(annotation):
        return f"the keys {', '.join(annotation.model_fields) or '(none)'}"
    word = WORDS.get(annotation) or getattr(annotation, "__name__", str(annotation))
    return word + _limits(bounds)


def _list(origin: Any, inner: tuple) -> str:
    each = [describe(Slot(member)) for member in inner if member is not ...]
    if origin is tuple and ... not in inner:
        return f"a list [{', '.join(each)}]"
    return f"a list of {each[0]}"


def _limits(bounds: Sequence[Any]) -> str:
    stated = [
        sign.format(value)
        for bound in bounds
        for name, sign in SIGNS.items()
        if (value := getattr(bound, name, None)) is not None
    ]
    return " " + " and ".join(stated) if stated else ""


def _tag(field: FieldInfo) -> str | None:
    return None if field.discriminator is None else str(field.discriminator)


def _bare(choice: Any) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)

"""What is wrong with a params.yaml, in the words of the person who wrote it.

pydantic's errors name Python types and tags of unions; here every problem is one line with file,
line, column, key, what was found and what is allowed, derived from the annotations that refused it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from moecore.core.sources import ROOT
from moecore.study.document import Document, near
from moecore.study.mistakes import plain
from moecore.study.slots import Slot, child, describe, is_model, members, resolve

LONGEST = 60  # characters of a value that are shown


def problems(
    error: ValidationError,
    model: type[BaseModel],
    places: Mapping[str, tuple[str, ...]],
    document: Document,
    absent: Collection[str] = (),
) -> list[str]:
    """One line per problem, in the order of the file.

    places: where each field of ``model`` sits in the document (at its own name where it is not
    given); absent: fields that are reported already.
    """
    lines: dict[tuple, str] = {}
    for item in error.errors(include_url=False):
        if item["loc"] and item["loc"][0] in absent:
            continue
        if item["type"] == "default_factory_not_called":
            continue  # follows from another problem, which has a line of its own
        path, slot, owner = walk(Slot(model), item["loc"])
        keys = (*places.get(str(path[0]), (path[0],)), *path[1:]) if path else ()
        place = document.place(keys)
        _, line, column = place.rsplit(":", 2)
        text = line_of(document, keys, _complaint(item, path, slot, owner))
        lines.setdefault((int(line), int(column), keys), text)
    return [lines[key] for key in sorted(lines, key=lambda key: key[:2])]


def line_of(document: Document, keys: Sequence[str | int], text: str) -> str:
    """One line with the place, the key and what is wrong, however the file spells it."""
    return f"{document.place(keys)}: {spell(keys)}: {plain(text)}"


def spell(keys: Sequence[str | int]) -> str:
    """``("a", 0, "b")`` as ``a[0].b``."""
    words = [f"[{key}]" if isinstance(key, int) else f".{plain(str(key), LONGEST)}" for key in keys]
    return "".join(words).lstrip(".") or "(the whole file)"


def walk(slot: Slot, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], Slot, Slot]:
    """Follow a pydantic location.

    Returns the keys as the file has them (no tags of unions), the type there, and the type that
    holds it.
    """
    slot = resolve(slot)
    owner = slot
    path: list[str | int] = []
    for part in loc:
        if part == "[key]":
            break
        if slot.discriminator:
            tagged = members(slot)
            slot = resolve(Slot(tagged[str(part)])) if str(part) in tagged else slot
            continue
        inner = child(slot.annotation, part)
        if inner is None:
            # A plain union or a validator's own marker: the problem is with the value as a whole.
            if is_model(slot.annotation):
                path.append(part)
                return tuple(path), Slot(Any), slot
            break
        owner = slot
        slot = resolve(inner)
        path.append(part)
    return tuple(path), slot, owner


def _complaint(item: Any, path: tuple, slot: Slot, owner: Slot) -> str:
    kind = item["type"]
    if kind == "extra_forbidden" and is_model(owner.annotation):
        allowed = list(owner.annotation.model_fields)
        listed = ", ".join(allowed) or "(none)"
        return f"unknown key{near(path[-1], allowed)}; allowed: {listed}"
    if kind == "missing":
        return f"missing; allowed: {describe(slot)}"
    if kind in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"])
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_kind(item, slot)
    return _wrong_value(item, slot, owner)


def _wrong_kind(item: Any, slot: Slot) -> str:
    known = list(members(slot))
    if item["type"] == "union_tag_not_found":
        tag = slot.discriminator
        return f"{tag} is missing; allowed: {tag}: {' | '.join(known)}"
    found = item["ctx"]["tag"]
    family = next(iter(members(slot).values())).__module__.rpartition(".")[0]
    hint = unlisted(found, family.replace(".", "/")) or near(found, known)
    found = plain(found, LONGEST)
    return f"found {slot.discriminator}: {found}{hint}; allowed: {', '.join(known)}"


def unlisted(name: object, folder: str) -> str:
    """A hint where a part is written and its family does not name it, else nothing."""
    if not (isinstance(name, str) and name.isidentifier() and len(name) <= LONGEST):
        return ""
    if not (ROOT / folder / f"{name}.py").is_file():
        return ""
    return f", which {folder}/__init__.py does not name; add {folder}/{name}.py to it"


def _wrong_value(item: Any, slot: Slot, owner: Slot) -> str:
    value = item["input"]
    if item["loc"] and item["loc"][-1] == "[key]":
        name = Slot(get_args(owner.annotation)[0])
        hint = near(value, get_args(name.annotation))
        return f"found the key {value!r}{hint}; allowed: {describe(name)}"
    literal = item["type"] == "literal_error"
    hint = near(value, get_args(slot.annotation)) if literal else ""
    return f"found {show(value)}{hint}; allowed: {describe(slot)}"


def show(value: Any) -> str:
    """A value with its type, as the file would spell it: ``'two' (str)``, ``a list of 3``."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return plain(f"the keys {', '.join(map(str, value))}", 300) if value else "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    if len(text) > LONGEST:
        text = text[: LONGEST - 3] + "..."
    return f"{text} ({type(value).__name__})"

"""pydantic's errors as lines with file, line, column and key.

``params.yaml:7:7: methods.vmoe.router.k: found 0 (int); allowed: greater than or equal to 1``
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from moecore.core.config import KIND as TAG
from moecore.core.config import UNKNOWN_KIND, is_family_base, part_classes_by_kind
from moecore.study.document import (
    SHOWN_LETTERS,
    Document,
    did_you_mean,
    shorten_to_one_line,
    show_value,
    spell_keys,
)

Keys = tuple[str | int, ...]

# for pydantic's words of JSON
PLAIN_WORDS = {"an object": "keys with values", "a valid array": "a list"}


def format_error_line(document: Document, keys: Sequence[str | int], text: str) -> str:
    """Return one line with the place, the key and what is wrong, however the file spells it."""
    return f"{document.place(keys)}: {spell_keys(keys)}: {shorten_to_one_line(text)}"


def list_error_lines(
    error: ValidationError,
    model: type[BaseModel],
    document: Document,
    places: Mapping[str, Keys] | None = None,
    absent: Collection[str] = (),
) -> list[str]:
    """Return one line per error, in the order of the file.

    places: where each field of ``model`` stands in the document (at its own name where it is not
    given); absent: fields that are reported already.
    """
    texts: dict[Keys, list[tuple[str, str]]] = {}
    for item in error.errors(include_url=False):
        loc = item["loc"]
        if loc and loc[0] in absent or item["type"] == "default_factory_not_called":
            continue  # follows from another error, which has a line of its own
        keys = _keys_at(item, places or {}, document.data)
        texts.setdefault(keys, []).append(_found_and_allowed(item, keys, model))
    lines = [
        (document.place(keys), format_error_line(document, keys, _join_members(several)))
        for keys, several in texts.items()
        # A member of a union may say what is wrong further in
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other in texts)
    ]
    return [line for _, line in sorted(lines, key=lambda pair: _position(pair[0]))]


def _position(place: str) -> tuple[int, int]:
    _, line, column = place.rsplit(":", 2)
    return int(line), int(column)


def _join_members(several: Sequence[tuple[str, str]]) -> str:
    """Return what the members of a union say of one value as one text."""
    allowed = " or ".join(dict.fromkeys(allowed for _, allowed in several if allowed))
    return f"{several[0][0]}; allowed: {allowed}" if allowed else several[0][0]


def _keys_at(item: Any, places: Mapping[str, Keys], data: Any) -> Keys:
    """Return the keys of the file that pydantic's location names.

    A location also has the kinds of unions and pydantic's own marks, which the file has not.
    """
    if not item["loc"]:
        return ()
    first, *rest = item["loc"]
    keys = list(places.get(str(first), (first,)))
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    tag_is_next = True
    for place, part in enumerate(rest):
        last = place == len(rest) - 1
        if isinstance(data, dict):
            if tag_is_next and data.get(TAG) == part:
                tag_is_next = False
            elif part in data or last and item["type"] == "missing":
                keys.append(part)
                data = data.get(part)
                tag_is_next = True
        elif isinstance(data, list) and isinstance(part, int):
            keys.append(part)
            data = data[part] if part < len(data) else None
            tag_is_next = True
    return tuple(keys)


def _found_and_allowed(item: Any, keys: Keys, model: type[BaseModel]) -> tuple[str, str]:
    kind = item["type"]
    value = item["input"]
    if kind in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"]), ""
    if kind == "extra_forbidden":
        owners = _models_at(model, item["loc"][:-1])
        names = [name for owner in owners for name in owner.model_fields]
        return f"unknown key{did_you_mean(keys[-1], names)}", ", ".join(names) or "(none)"
    if kind == "missing":
        return "missing", describe_field(model, item["loc"])
    if kind == "union_tag_not_found":
        return f"{TAG} is missing", _describe_models(_models_at(model, item["loc"]))
    if kind == "union_tag_invalid":
        tag = item["ctx"]["tag"]
        known = re.findall(r"'([^']*)'", item["ctx"]["expected_tags"])
        shown = f"found {TAG}: {shorten_to_one_line(tag, SHOWN_LETTERS)}{did_you_mean(tag, known)}"
        return shown, ", ".join(known)
    if kind == UNKNOWN_KIND:
        tag, kinds = item["ctx"]["tag"], item["ctx"]["kinds"]
        hint = did_you_mean(tag, kinds.split(", "))
        shown = f"found {TAG}: {shorten_to_one_line(tag, SHOWN_LETTERS)}{hint}"
        return shown, f"{kinds}, or package.module where `packages` lists that package"
    if kind in ("model_type", "dict_type") and (models := _models_at(model, item["loc"])):
        return f"found {show_value(value)}", _describe_models(models)
    allowed = item["msg"].removeprefix("Input should be ")
    allowed = PLAIN_WORDS.get(allowed, allowed[:1].lower() + allowed[1:])
    hint = ""
    if kind == "literal_error":
        hint = did_you_mean(value, re.findall(r"'([^']*)'", allowed))
    key = "the key " if item["loc"][-1:] == ("[key]",) else ""
    return f"found {key}{show_value(value)}{hint}", allowed


def describe_field(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Return what may stand at pydantic's location: keys or kinds, else the field's description."""
    if models := _models_at(model, loc):
        return _describe_models(models)
    owners = [owner for owner in _models_at(model, loc[:-1]) if loc[-1] in owner.model_fields]
    described = owners[0].model_fields[str(loc[-1])].description if owners else None
    return described.rstrip(".") if described else "a value"


def _describe_models(models: Sequence[type[BaseModel]]) -> str:
    if len(models) == 1:
        return f"the keys {', '.join(models[0].model_fields) or '(none)'}"
    return f"{TAG}: {' | '.join(str(model.model_fields[TAG].default) for model in models)}"


def _models_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[type[BaseModel]]:
    """Return the models that a value may be at pydantic's location; none where it is plain."""
    models = [model]
    for part in loc:
        fields = [owner.model_fields[str(part)] for owner in models if part in owner.model_fields]
        tags = [owner.model_fields.get(TAG) for owner in models]
        tagged = [one for one, tag in zip(models, tags, strict=True) if tag and tag.default == part]
        if len(models) > 1 and tagged:
            models = tagged
        elif fields:
            models = _models_in(fields[0].annotation)
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models anywhere inside an annotation; of a family its parts."""
    if isinstance(annotation, type) and is_family_base(annotation):
        return list(part_classes_by_kind(annotation).values())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]

"""Reads params.yaml as typed settings; errors are printed with file, line, column and key.

A stage's model is a ``Config`` whose fields are keys of params.yaml; a field with another key has
a template. After reading, the process may import parts of the packages that the file lists::

    class Params(Config):
        pretrain: Training
        method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]

    params = read_stage_params(Params, method="vmoe")

pydantic's errors become lines with file, line, column and key:
``params.yaml:7:7: methods.vmoe.router.k: found 0 (int); allowed: greater than or equal to 1``
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from moecore.core import config, files, source_layout
from moecore.core.config import KIND as TAG
from moecore.study import yaml_document

AnyConfig = TypeVar("AnyConfig", bound=config.Config)
Keys = tuple[str | int, ...]
ERROR_PLACE_PATTERN = re.compile(r"(.*?):(\d+):(\d+): ")  # of an error's line
# instead of pydantic's terms of JSON
PLAIN_WORDS = {"an object": "keys with values", "a valid array": "a list"}


@dataclass(frozen=True)
class ParamsKeyTemplate:
    """Annotation of a settings field: its key in params.yaml, with {placeholders}."""

    path: str


def params_keys_by_field(model: type[config.Config]) -> dict[str, str]:
    """Return field → key in params.yaml, with placeholders."""
    keys = {}
    for name, field in model.model_fields.items():
        named = [note.path for note in field.metadata if isinstance(note, ParamsKeyTemplate)]
        keys[name] = named[0] if named else name
    return keys


def read_stage_params(model: type[AnyConfig], path: str | None = None, **item: object) -> AnyConfig:
    """Read settings of class ``model``; item: values of {placeholders}; UserError if invalid."""
    # path: by default $MOECORE_PARAMS, else ./params.yaml. item: such as ``method="vmoe"``.
    path = path or os.environ.get("MOECORE_PARAMS") or "params.yaml"
    return extract_settings(model, yaml_document.load_yaml_document(path), **item)


def extract_settings(
    model: type[AnyConfig], document: yaml_document.YamlDocument, **item: object
) -> AnyConfig:
    """Read settings of class ``model`` from a document, as ``read_stage_params`` from a file."""
    places: dict[str, Keys] = {
        name: tuple(template.format(**item).split("."))
        for name, template in params_keys_by_field(model).items()
    }
    values: dict[str, Any] = {}
    missing = []
    for name, place in places.items():
        try:
            values[name] = document.get([str(key) for key in place])
        except files.UserError as error:
            if model.model_fields[name].is_required():
                missing.append(str(error))
    return _validate(model, values, places, document, missing)


def validate_document(kind: type[AnyConfig], document: yaml_document.YamlDocument) -> AnyConfig:
    """Return a whole document as settings of class ``kind``; UserError: a line per problem."""
    if not isinstance(document.data, dict):
        raise files.UserError.at(
            f"{document.path}:1:1",
            found=type(document.data).__name__,
            allowed=f"keys {', '.join(kind.model_fields)}",
        )
    return _validate(kind, document.data, {}, document, [])


def _validate(
    model: type[AnyConfig],
    values: dict[str, Any],
    places: dict[str, Keys],
    document: yaml_document.YamlDocument,
    problems: list[str],
) -> AnyConfig:
    source_layout.allow_packages(document.packages, document.folders)
    try:
        # Strict JSON: a list may fill a tuple, but "3" is no integer and 1 is no bool.
        settings = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        absent = {name for name in places if name not in values}
        problems = problems + _list_error_lines(error, model, document, places, absent)
    else:
        if not problems:
            return settings
    raise files.UserError("\n".join(problems)) from None


def _list_error_lines(
    error: ValidationError,
    model: type[BaseModel],
    document: yaml_document.YamlDocument,
    places: Mapping[str, Keys],
    absent: Collection[str],
) -> list[str]:
    """Return a line per error in file order, none for ``absent``; places: field → keys in file."""
    # places: keys of fields in the document, if not their names; absent: fields already reported.
    texts: dict[Keys, list[tuple[str, str]]] = {}
    for item in error.errors(include_url=False):
        loc = item["loc"]
        if loc and loc[0] in absent or item["type"] == "default_factory_not_called":
            continue  # follows from another error
        keys = _file_keys_of_error(item, places, document.data)
        texts.setdefault(keys, []).append(_found_and_allowed(item, keys, model))
    lines = []
    for keys, several in texts.items():
        # Only the deepest error counts, if members of a union report several levels
        if any(len(other) > len(keys) and other[: len(keys)] == keys for other in texts):
            continue
        allowed = " or ".join(dict.fromkeys(allowed for _, allowed in several if allowed))
        text = f"{several[0][0]}; allowed: {allowed}" if allowed else several[0][0]
        lines.append(str(document.error(keys, text)))
    return sorted(lines, key=error_line_position)


def error_line_position(line: str) -> tuple[str, int, int]:
    """Return (file, line, column) at the start of an error's line; ("", 0, 0) if missing."""
    match = ERROR_PLACE_PATTERN.match(line)
    if match:
        return (match[1], int(match[2]), int(match[3]))
    return ("", 0, 0)


def _file_keys_of_error(item: Any, places: Mapping[str, Keys], data: Any) -> Keys:
    if not item["loc"]:
        return ()
    first, *rest = item["loc"]
    keys = list(places.get(str(first), (first,)))
    for key in keys:
        data = yaml_document.dict_or_empty(data).get(key)
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
        owners = _classes_at(model, item["loc"][:-1])
        names = [name for owner in owners for name in owner.model_fields]
        hint = yaml_document.did_you_mean(keys[-1], names)
        return f"unknown key{hint}", ", ".join(names) or "(none)"
    if kind == "missing":
        return "missing", describe_allowed_values(model, item["loc"])
    if kind == "union_tag_not_found":
        return f"{TAG} is missing", _describe_classes(_classes_at(model, item["loc"]))
    if kind in ("union_tag_invalid", config.UNKNOWN_KIND):
        tag = item["ctx"]["tag"]
        is_part = kind == config.UNKNOWN_KIND
        listed = item["ctx"]["kinds" if is_part else "expected_tags"].replace("'", "")
        hint = yaml_document.did_you_mean(tag, listed.split(", "))
        outside = ", or package.module where `packages` lists that package" if is_part else ""
        shown = yaml_document.shorten_to_one_line(tag, yaml_document.SHOWN_LETTERS)
        return f"found {TAG}: {shown}{hint}", listed + outside
    if kind in ("model_type", "dict_type") and (models := _classes_at(model, item["loc"])):
        return f"found {yaml_document.show_value(value)}", _describe_classes(models)
    allowed = item["msg"].removeprefix("Input should be ")
    allowed = PLAIN_WORDS.get(allowed, allowed[:1].lower() + allowed[1:])
    hint = ""
    if kind == "literal_error":
        hint = yaml_document.did_you_mean(value, re.findall(r"'([^']*)'", allowed))
    key = "the key " if item["loc"][-1:] == ("[key]",) else ""
    return f"found {key}{yaml_document.show_value(value)}{hint}", allowed


def describe_allowed_values(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Describe the values that ``model`` allows at ``loc``, the location of a pydantic error."""
    if models := _classes_at(model, loc):
        return _describe_classes(models)
    owners = [owner for owner in _classes_at(model, loc[:-1]) if loc[-1] in owner.model_fields]
    described = owners[0].model_fields[str(loc[-1])].description if owners else None
    return described.rstrip(".") if described else "a value"


def _describe_classes(models: Sequence[type[BaseModel]]) -> str:
    if len(models) == 1:
        return f"the keys {', '.join(models[0].model_fields) or '(none)'}"
    return f"{TAG}: {' | '.join(str(model.model_fields[TAG].default) for model in models)}"


def _classes_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[type[BaseModel]]:
    """Return the settings classes that ``model`` allows at a pydantic error's ``loc``; or []."""
    models = [model]
    for part in loc:
        fields = [owner.model_fields[str(part)] for owner in models if part in owner.model_fields]
        tags = [(owner, owner.model_fields.get(TAG)) for owner in models]
        tagged = [owner for owner, tag in tags if tag and tag.default == part]
        if len(models) > 1 and tagged:
            models = tagged
        elif fields:
            models = _classes_in(fields[0].annotation)
    return models


def _classes_in(annotation: Any) -> list[type[BaseModel]]:
    """Return an annotation's settings classes; for a base class (Router), every kind's class."""
    models: list[type[BaseModel]] = []
    for settings in config.settings_classes_in_annotation(annotation):
        if config.is_family_base(settings):
            models += config.part_classes_by_kind(settings).values()
        else:
            models.append(settings)
    return models

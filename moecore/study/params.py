"""params.yaml into typed settings; a stage reads exactly the keys that it declares.

A stage's model is a ``Config`` whose fields are keys of params.yaml; one that sits elsewhere says
where::

    class Params(Config):
        pretrain: Training
        method: Annotated[Method, Key("methods.{method}")]

    params = read(Params, method="vmoe")
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.study.document import Document, load, parse
from moecore.study.problems import problems

M = TypeVar("M", bound=Config)


@dataclass(frozen=True)
class Key:
    """Where a field sits in params.yaml: dotted keys; ``read`` fills in what is in braces."""

    path: str


def keys(model: type[Config]) -> dict[str, str]:
    """Field → key in params.yaml, in the order of the fields; ``params:`` of dvc.yaml has these."""
    found = {}
    for name, field in model.model_fields.items():
        named = [note.path for note in field.metadata if isinstance(note, Key)]
        found[name] = named[0] if named else name
    return found


def read(model: type[M], path: str | None = None, **item: object) -> M:
    """The settings that ``model`` declares, from ``path`` ($MOECORE_PARAMS, else ./params.yaml).

    item: what fills the templates of the keys, such as ``method="vmoe"``.
    Raises UserError, a line per problem: file, line, column, key, what was found, what is allowed.
    """
    path = path or os.environ.get("MOECORE_PARAMS") or "params.yaml"
    return validate(model, load(str(path)), **item)


def read_section(name: str, model: type[Config], path: str | None = None) -> Config:
    """The section ``name`` alone, as the one field of the settings returned."""
    fields: dict[str, Any] = {name: (model, ...)}
    return read(create_model("Params", __base__=Config, **fields), path)


def check(model: type[M], text: str, path: str = "params.yaml", **item: object) -> M:
    """Like ``read`` for a text; ``path`` is only named in the errors."""
    return validate(model, parse(text, path), **item)


def validate(model: type[M], document: Document, **item: object) -> M:
    """Pick the declared keys of ``document`` and validate them; raises UserError like ``read``."""
    places = {
        name: tuple(template.format(**item).split(".")) for name, template in keys(model).items()
    }
    values: dict[str, Any] = {}
    missing = []
    for name, place in places.items():
        try:
            values[name] = document.get(place)
        except UserError as error:
            if model.model_fields[name].is_required():
                missing.append(str(error))
    return _validated(model, values, places, document, missing)


def validate_whole(model: type[M], document: Document) -> M:
    """Validate all of ``document``: its top-level keys are the fields of ``model`` and no others.

    Raises UserError with one line per problem.
    """
    if not isinstance(document.data, dict):
        found = type(document.data).__name__
        allowed = ", ".join(model.model_fields)
        raise UserError(f"{document.path}:1:1: found {found}; allowed: keys {allowed}")
    return _validated(model, document.data, {}, document, [])


def _validated(
    model: type[M],
    values: dict[str, Any],
    places: Mapping[str, tuple[str, ...]],
    document: Document,
    found: list[str],
) -> M:
    try:
        # As JSON and strict: a list may fill a tuple, but "3" is no integer and 1 no truth value.
        settings = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        absent = {name for name in places if name not in values}
        found = found + problems(error, model, places, document, absent)
    else:
        if not found:
            return settings
    raise UserError("\n".join(found)) from None

"""Floor 0: params.yaml into typed settings; a stage reads exactly the keys that it declares.

A stage's model is a ``Config`` whose fields are keys of params.yaml. A field that sits elsewhere says where::

    class Params(Config):
        pretrain: Training
        method: Annotated[Method, Key("methods.{method}")]

    params = read(Params, method="vmoe")
"""

import json
import os
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from moecore.config import Config
from moecore.files import StageError
from moecore.problems import problems
from moecore.yaml12 import Document, load, parse

M = TypeVar("M", bound=Config)


@dataclass(frozen=True)
class Key:
    """Where a field sits in params.yaml: dotted keys, with ``{name}`` for what ``read(..., name=...)`` fills in."""

    path: str


def keys(model: type[Config]) -> dict[str, str]:
    """Field name → key template in params.yaml, in the order of the fields; dvc.yaml's ``params:`` equal the values."""
    return {name: next((note.path for note in field.metadata if isinstance(note, Key)), name) for name, field in model.model_fields.items()}


def read(model: type[M], path: str | None = None, **item: object) -> M:
    """The settings that ``model`` declares, from ``path`` (default: $MOECORE_PARAMS, else ./params.yaml).

    item: what fills the templates of the keys, such as ``method="vmoe"``.
    Raises StageError with one line per problem: file, line, column, key, what was found and what is allowed.
    """
    return validate(model, load(str(path or os.environ.get("MOECORE_PARAMS") or "params.yaml")), **item)


def check(model: type[M], text: str, path: str = "params.yaml", **item: object) -> M:
    """Like ``read`` for a text; ``path`` is only named in the errors."""
    return validate(model, parse(text, path), **item)


def validate(model: type[M], document: Document, **item: object) -> M:
    """Pick the declared keys of ``document`` and validate them; raises StageError like ``read``."""
    places = {name: tuple(template.format(**item).split(".")) for name, template in keys(model).items()}
    values, missing = {}, []
    for name, place in places.items():
        try:
            values[name] = document.get(place)
        except StageError as error:
            if model.model_fields[name].is_required():
                missing.append(str(error))
    return _validated(model, values, places, document, missing)


def validate_whole(model: type[M], document: Document) -> M:
    """Validate all of ``document`` against ``model``, whose fields are its top-level keys; unknown keys are errors."""
    if not isinstance(document.data, dict):
        raise StageError(f"{document.path}:1:1: found {type(document.data).__name__}; allowed: keys {', '.join(model.model_fields)}")
    return _validated(model, document.data, {}, document, [])


def _validated(model: type[M], values: dict, places: dict[str, tuple[str, ...]], document: Document, found: list[str]) -> M:
    try:  # as JSON and strict: a list may fill a tuple, but "3" is no integer, 1 no truth value and "no" no false
        settings = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        absent = {name for name in places if name not in values}
        found = found + problems(error, model, places, document, absent)
    else:
        if not found:
            return settings
    raise StageError("\n".join(found)) from None

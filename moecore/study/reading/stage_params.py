"""params.yaml into typed settings; a stage reads exactly the keys that it declares.

A stage's model is a ``Config`` whose fields are keys of params.yaml; one that sits elsewhere says
where. From then on the process may import parts of the packages that the file lists::

    class Params(Config):
        pretrain: Training
        method: Annotated[Method, Key("methods.{method}")]

    params = read_params(Params, method="vmoe")
"""

import json
import os
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages
from moecore.study.document import Document, load_yaml_document
from moecore.study.settings import Keys, list_error_lines

AnySettings = TypeVar("AnySettings", bound=Config)


@dataclass(frozen=True)
class ParamsKeyTemplate:
    """Dotted keys of params.yaml at which a field sits; ``read_params`` fills in braces."""

    path: str


def params_keys_by_field(model: type[Config]) -> dict[str, str]:
    """Return field → key in params.yaml, as ``params:`` of dvc.yaml has them."""
    keys = {}
    for name, field in model.model_fields.items():
        named = [note.path for note in field.metadata if isinstance(note, ParamsKeyTemplate)]
        keys[name] = named[0] if named else name
    return keys


def read_params(model: type[AnySettings], path: str | None = None, **item: object) -> AnySettings:
    """Return the settings that ``model`` declares.

    path: the file, left out: $MOECORE_PARAMS, else ./params.yaml. item: what fills the templates of
    the keys, such as ``method="vmoe"``. Raises UserError, a line per problem.
    """
    path = path or os.environ.get("MOECORE_PARAMS") or "params.yaml"
    return extract_declared_settings(model, load_yaml_document(path), **item)


def read_section_as_params(name: str, model: type[Config]) -> Config:
    """Return the section ``name`` alone, as the one field of the settings returned."""
    fields: dict[str, Any] = {name: (model, ...)}
    return read_params(create_model("Params", __base__=Config, **fields))


def extract_declared_settings(
    model: type[AnySettings], document: Document, **item: object
) -> AnySettings:
    """Return the keys of ``document`` that ``model`` declares, validated.

    Raises UserError, a line per problem: file, line, column, key, what was found, what is allowed.
    """
    places: dict[str, Keys] = {
        name: tuple(template.format(**item).split("."))
        for name, template in params_keys_by_field(model).items()
    }
    values: dict[str, Any] = {}
    missing = []
    for name, place in places.items():
        try:
            values[name] = document.get([str(key) for key in place])
        except UserError as error:
            if model.model_fields[name].is_required():
                missing.append(str(error))
    return _validate(model, values, places, document, missing)


def validate_whole(model: type[AnySettings], document: Document) -> AnySettings:
    """Return all of ``document``, validated: its keys are the fields of ``model`` and no others.

    Raises UserError with one line per problem.
    """
    if not isinstance(document.data, dict):
        kind = type(document.data).__name__
        allowed = ", ".join(model.model_fields)
        raise UserError(f"{document.path}:1:1: found {kind}; allowed: keys {allowed}")
    return _validate(model, document.data, {}, document, [])


def _validate(
    model: type[AnySettings],
    values: dict[str, Any],
    places: dict[str, Keys],
    document: Document,
    problems: list[str],
) -> AnySettings:
    allow_packages(document.packages, document.folders)
    try:
        # As JSON and strict: a list may fill a tuple, but "3" is no integer and 1 no truth value.
        settings = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        absent = {name for name in places if name not in values}
        problems = problems + list_error_lines(error, model, document, places, absent)
    else:
        if not problems:
            return settings
    raise UserError("\n".join(problems)) from None

"""The base of every configuration object."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moecore.core.files import UserError, read_json


class Config(BaseModel):
    """Immutable settings that refuse unknown keys.

    A *part* (router, attack, ...) is a subclass whose ``kind`` literal is its file's stem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


AnySettings = TypeVar("AnySettings", bound=Config)


def replace_and_validate(
    section: str,
    settings: AnySettings,
    changes: Mapping[str, Any],
    family: Any = None,
) -> AnySettings:
    """Settings with some other values, checked anew. Raises UserError, naming the key.

    family: of the parts that they may become where ``kind`` is among the changes; what the other
    part does not have is left behind.
    """
    values = settings.model_dump()
    if family is not None and "kind" in changes:
        there = family.fields_of_kind(str(changes["kind"]))
        values = {name: value for name, value in values.items() if name in there}
    values |= changes
    try:
        if family is not None and "kind" in changes:
            return family.model_validate(values)
        return settings.__class__.model_validate(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(str(word) for word in first_error["loc"] if word != values.get("kind"))
        message = f"{first_error['msg']} (found {first_error['input']!r})"
        raise UserError(f"{section}.{key}: {message}") from None


def validate_again(settings: AnySettings, key: str) -> AnySettings:
    """Settings of which some were changed; UserError at ``key`` where they do not fit each other.

    What a model was built with without this, the file of its settings could not be read again.
    """
    try:
        return settings.__class__.model_validate(settings.model_dump())
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{key}: {reason}") from None


def read_json_settings(path: Path, kind: type[AnySettings], what: str) -> AnySettings:
    """A JSON file as settings; raises UserError that names it where it holds none."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        again = "run the stage that writes it again"
        raise UserError(f"{path}: not {what} of this version ({problem}); {again}") from error

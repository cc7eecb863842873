"""The base of every configuration object."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moecore.core.files import UserError


class Config(BaseModel):
    """Immutable settings that refuse unknown keys.

    A *part* (router, experts, regularizer, attack, ...) is a subclass with a ``kind`` literal equal
    to its file's stem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


AnySettings = TypeVar("AnySettings", bound=Config)


def changed(section: str, settings: AnySettings, changes: Mapping[str, Any]) -> AnySettings:
    """Settings with some other values, checked anew. Raises UserError, naming the key."""
    try:
        return settings.__class__.model_validate(settings.model_dump() | dict(changes))
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"]))
        said = f"{found['msg']} (found {found['input']!r})"
        raise UserError(f"{section}.{key}: {said}") from None

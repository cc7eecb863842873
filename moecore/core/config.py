"""The base of every configuration object."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Immutable settings that refuse unknown keys.

    A *part* (router, experts, regularizer, attack, ...) is a subclass with a ``kind`` literal equal
    to its file's stem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

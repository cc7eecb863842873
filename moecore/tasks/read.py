"""A task from what a data card says of it."""

from typing import Any

from pydantic import TypeAdapter

from moecore.tasks import AnyTask


def read_task(settings: Any) -> AnyTask:
    """The task that a card's ``task`` describes. Raises pydantic.ValidationError."""
    return TypeAdapter(AnyTask).validate_python(settings)

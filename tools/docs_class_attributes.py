"""For mkdocstrings: an attribute without annotation is no field of a pydantic class."""

from typing import Any

import griffe


class ClassAttributes(griffe.Extension):
    """Runs before griffe_pydantic, which would list it as a field without a type."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Label the attribute as one that instances do not have."""
        if attr.annotation is None and attr.parent is not None and attr.parent.is_class:
            attr.labels.discard("instance-attribute")

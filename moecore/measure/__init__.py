"""Measurements of a trained model: a family of parts (see base.py), and what they share."""

from typing import Any


def __getattr__(name: str) -> Any:
    from moecore.core.config import find_by_class_name
    from moecore.measure.base import Measurement

    return find_by_class_name(Measurement, name)


def __dir__() -> list[str]:
    from moecore.core.config import list_class_names
    from moecore.measure.base import Measurement

    return list_class_names(Measurement)

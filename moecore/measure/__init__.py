"""Measurements of a trained model, a family of parts (see base.py); ``moecore.measure.Cost``."""

from typing import Any

from moecore.core.part_families import import_part_by_class, list_class_names


def __getattr__(name: str) -> Any:
    return import_part_by_class(__name__, name)


def __dir__() -> list[str]:
    return list_class_names(__name__)

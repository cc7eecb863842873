"""Attacks on images: a family of parts (see base.py); ``moecore.attacks.Pgd`` is public."""

from typing import Any

from moecore.core.part_families import import_part_by_class, list_class_names


def __getattr__(name: str) -> Any:
    return import_part_by_class(__name__, name)


def __dir__() -> list[str]:
    return list_class_names(__name__)

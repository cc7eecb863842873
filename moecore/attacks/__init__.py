"""Attacks on images: a family of parts (see base.py); ``moecore.attacks.Pgd`` is public."""

from typing import Any


def __getattr__(name: str) -> Any:
    from moecore.attacks.base import Attack
    from moecore.core.config import find_by_class_name

    return find_by_class_name(Attack, name)


def __dir__() -> list[str]:
    from moecore.attacks.base import Attack
    from moecore.core.config import list_class_names

    return list_class_names(Attack)

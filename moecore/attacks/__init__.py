"""Attacks on images: a family of parts (see base.py); ``moecore.attacks.Pgd`` is public."""

from moecore.core.part_families import offer_classes

__getattr__, __dir__ = offer_classes("moecore.attacks.base:Attack")

"""Attacks on images: a family of parts (base.py); ``moecore.attacks.Pgd`` is public."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.attacks.base:Attack")

"""Attacks on images: a family of parts (base.py); ``moecore.attacks.Pgd`` is public."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.attacks.base:Attack")

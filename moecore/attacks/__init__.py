"""Attacks on images: a family of parts (base.py); ``moecore.attacks.Pgd`` is public."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.attacks.base:Attack")

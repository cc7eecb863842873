"""Experts, all of a layer in one module: a family of parts (see base.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.experts.base:Experts")

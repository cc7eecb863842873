"""Experts, all of a layer in one module: a family of parts."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.nn.experts.base:Experts")

"""Experts, all of a layer in one module: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.nn.experts.base:Experts")

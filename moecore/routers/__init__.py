"""Routers, which decide which token goes to which expert: a family of parts."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.nn.routers.base:Router")

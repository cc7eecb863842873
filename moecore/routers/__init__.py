"""Routers, which decide which token goes to which expert: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.nn.routers.base:Router")

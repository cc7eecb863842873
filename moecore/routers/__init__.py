"""Routers, which decide which token goes to which expert: a family of parts."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.nn.routers.base:Router")

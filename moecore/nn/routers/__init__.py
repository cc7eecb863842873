"""Routers, which decide which token goes to which expert: a family of parts (see base.py).

Letters of shapes are those of ``moecore.nn``.
"""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.routers.base:Router")

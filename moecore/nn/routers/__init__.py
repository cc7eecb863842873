"""Routers, which decide which token goes to which expert: a family of parts (see base.py).

Shapes in all files: B images, T tokens per image, E experts, k chosen per token, token width d.
"""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.routers.base:Router")

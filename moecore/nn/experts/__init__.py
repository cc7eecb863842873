"""The experts of a layer, which compute in one module: a family of parts (see base.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.experts.base:Experts")

"""Balancing without a loss: a family of parts, settings of routers."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.nn.balances.base:Balance")

"""Balancing without a loss: a family of parts, settings of routers."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.nn.balances.base:Balance")

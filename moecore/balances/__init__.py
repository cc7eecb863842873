"""Balancing without a loss: a family of parts, settings of routers."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.nn.balances.base:Balance")

"""Data sources, which write prepared folders: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.data.sources.base:Source")

"""Data sources, which write prepared folders: a family of parts."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.data.sources.base:Source")

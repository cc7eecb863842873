"""Data sources, which write prepared folders: a family of parts."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.data.sources.base:Source")

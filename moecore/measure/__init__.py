"""Measurements of a trained model, a family of parts, and the code that they share."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.measure.base:Measurement")

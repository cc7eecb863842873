"""Measurements of a trained model, a family of parts, and the code that they share."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.measure.base:Measurement")

"""Measurements of a trained model: a family of parts (see base.py), and what they share."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.measure.base:Measurement")

"""The losses that a method may add to the task's: a family of parts (base.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.training.regularizers.base:Regularizer")

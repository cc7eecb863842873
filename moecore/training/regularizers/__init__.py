"""The losses beside the task that a method may name: a family of parts (see base.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.training.regularizers.base:Regularizer")

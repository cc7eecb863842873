"""The losses that a method may add to the task's: a family of parts."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.training.regularizers.base:Regularizer")

"""The losses that a method may add to the task's: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.training.regularizers.base:Regularizer")

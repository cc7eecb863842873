"""Tasks, a family of parts: losses, scores and label checks. Only tasks interpret labels."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.tasks.base:Task")

"""Tasks, a family of parts: losses, scores and label checks. Only tasks interpret labels."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.tasks.base:Task")

"""The teachers of a section ``teacher``: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.training.teachers.base:Teacher")

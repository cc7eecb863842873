"""The teachers of a section ``teacher``: a family of parts."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.training.teachers.base:Teacher")

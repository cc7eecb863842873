"""The teachers of a section ``teacher``: a family of parts."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.training.teachers.base:Teacher")

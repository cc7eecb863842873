"""What is predicted: a family of parts (base.py). Only this room interprets labels."""

from moecore.core.config import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__, "moecore.tasks.base:Task")

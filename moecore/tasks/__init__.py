"""What is predicted: a family of parts (base.py). Only this room interprets labels."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes(__name__, "moecore.tasks.base:Task")

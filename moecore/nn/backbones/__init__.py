"""Models that a section ``model`` can name: a family of parts (see base_model.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.backbones.base_model:Backbone")

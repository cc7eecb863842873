"""The models that a section ``model`` may name: a family of parts (see base_model.py)."""

from moecore.core.config import offer_classes

__getattr__, __dir__ = offer_classes("moecore.nn.backbones.base_model:Backbone")

"""Models that a section ``model`` can name: a family of parts."""

from moecore.core.config import lazy_getattr

__getattr__, __dir__ = lazy_getattr(__name__, "moecore.nn.backbones.base_model:Backbone")

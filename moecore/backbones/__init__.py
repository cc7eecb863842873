"""The backbones that a `model:` section may name."""

from moecore.backbones.vit import Vit

Backbone = Vit

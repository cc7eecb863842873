"""A dense teacher, trained here on the pretraining data."""

from typing import Literal

from moecore.core.config import Config
from moecore.nn.backbones import Backbone
from moecore.nn.backbones.base_model import BackboneModel
from moecore.nn.backbones.input_spec import ImageSpec
from moecore.training.settings import Training


class Dense(Config):
    """A dense backbone and how it is trained; it may be wider or deeper than the student, with the
    same patches. Each seed of a study trains its own.
    """

    kind: Literal["dense"] = "dense"
    model: Backbone
    training: Training

    def build(self, image: ImageSpec) -> BackboneModel:
        """The untrained teacher for such images."""
        return self.model.build(image)

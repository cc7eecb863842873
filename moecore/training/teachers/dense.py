"""A dense teacher, trained here on the pretraining data."""

from typing import Literal

from moecore.nn.backbones.base_model import Backbone, BackboneModel
from moecore.nn.backbones.input_spec import ImageSpec
from moecore.training.settings import Training
from moecore.training.teachers.base import Teacher


class Dense(Teacher):
    """A dense teacher of any depth and width, with the student's patches; one for each seed."""

    kind: Literal["dense"] = "dense"
    model: Backbone
    training: Training

    def build(self, image: ImageSpec) -> BackboneModel:
        """The untrained teacher for such images."""
        return self.model.build(image)

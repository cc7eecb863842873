"""The base class of teachers' settings."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from moecore.core.config import Misfits, Part, Surroundings, part_classes_by_kind
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.training.settings import Training


class Teacher(Part, ABC):
    """Base class of a teacher's settings: how its model is built or trained."""

    training: Training | None = None  # in its stage; None: pretrained, the same for every seed
    data: Source | None = None  # its training data; None: data.pretrain
    volumes: ClassVar[bool] = True  # whether its images may have three axes

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (keys, message) for a teacher of 2D images, if the data are volumes."""
        if around.source is not None and around.source.volumes and not self.volumes:
            parts = part_classes_by_kind(Teacher).items()
            kinds = ", ".join(kind for kind, part in parts if part.volumes)
            text = f"found {self.kind}, whose models are of flat images"
            yield ("kind",), f"{text}; allowed for volumes: {kinds}"

    @abstractmethod
    def build(self, image: ImageSpec) -> BackboneModel:
        """Build the teacher's model for images like ``image``; UserError if impossible."""

    def open_data(self, pretraining: Prepared, work: Path) -> Prepared:
        """Return the teacher's training data; its own data are prepared in the folder ``work``."""
        return pretraining

    def check_name(self, image: ImageSpec) -> None:
        """Raise UserError if ``build`` would fail for ``image``, without downloading weights."""

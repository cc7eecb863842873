"""What every teacher says of itself."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from moecore.core.config import Part, part_classes_by_kind
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.training.settings import Training


class Teacher(Part, ABC):
    """A teacher, a family of parts."""

    training: Training | None = None  # by its stage; None: it comes trained, alike for every seed
    data: Source | None = None  # what it learns; None: data.pretrain
    volumes: ClassVar[bool] = True  # it may be of images of three axes

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield a teacher of flat images where volumes are learned."""
        if around.source is not None and around.source.volumes and not self.volumes:
            every = part_classes_by_kind(Teacher).items()
            fitting = ", ".join(kind for kind, part in every if part.volumes)
            text = f"found {self.kind}, whose models are of flat images"
            yield ("kind",), f"{text}; allowed for volumes: {fitting}"

    @abstractmethod
    def build(self, image: ImageSpec) -> BackboneModel:
        """Return its model for such images; UserError where there is none."""

    def open_data(self, pretraining: Prepared, work: Path) -> Prepared:
        """Return the data that it learns; work: the stage's folder, for what is prepared anew."""
        return pretraining

    def check_name(self, image: ImageSpec) -> None:
        """Raise UserError where ``build`` would for settings alone; nothing is downloaded."""

"""What every teacher says of itself."""

from abc import ABC, abstractmethod
from pathlib import Path

from moecore.core.config import Part
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.training.settings import Training


class Teacher(Part, ABC):
    """A teacher, a family of parts."""

    training: Training | None = None  # by its stage; None: it comes trained, alike for every seed
    data: Source | None = None  # what it learns; None: data.pretrain

    @abstractmethod
    def build(self, image: ImageSpec) -> BackboneModel:
        """Return its model for such images; UserError where there is none."""

    def open_data(self, pretraining: Prepared, work: Path) -> Prepared:
        """Return the data that it learns; work: the stage's folder, for what is prepared anew."""
        return pretraining

    def check_name(self, image: ImageSpec) -> None:
        """Raise UserError where ``build`` would for settings alone; nothing is downloaded."""

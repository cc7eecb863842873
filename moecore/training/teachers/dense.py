"""A dense teacher, trained here on the pretraining data or on data of its own."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.core.files import whole_folder
from moecore.core.ranks import broadcast_text, current_ranks
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec
from moecore.training.settings import Training
from moecore.training.teachers.base import Teacher


class Dense(Teacher):
    """A dense teacher of any depth and width, with the student's patches; one for each seed."""

    kind: Literal["dense"] = "dense"
    model: Backbone
    training: Training
    data: Source | None = Field(
        None, description="what it learns, of the size of data.pretrain; null: these themselves"
    )

    def build(self, image: ImageSpec) -> BackboneModel:
        """The untrained teacher for such images."""
        return self.model.build(image)

    def open_data(self, pretraining: Prepared, work: Path) -> Prepared:
        """Return its own data, which the first of several ranks prepares in ``work``."""
        if self.data is None:
            return pretraining
        place = work / "data"
        if current_ranks().first and not place.is_dir():
            with whole_folder(place) as folder:
                self.data.write(folder)
        broadcast_text("prepared")  # for which the other ranks wait
        return Prepared.open(place)

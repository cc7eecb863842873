"""A dense teacher, trained on the pretraining data or on its own data."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.core import files, ranks
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec
from moecore.training.settings import Training
from moecore.training.teachers.base import Teacher


class Dense(Teacher):
    """A dense teacher of any depth and width, with the student's patches; one per seed."""

    kind: Literal["dense"] = "dense"
    model: Backbone
    training: Training
    data: Source | None = Field(None, description="of data.pretrain's size; null: data.pretrain")

    def build(self, image: ImageSpec) -> BackboneModel:
        return self.model.build(image)

    def open_data(self, pretraining: Prepared, work: Path) -> Prepared:
        """Return the teacher's own data, prepared in ``work``; ``pretraining`` if it has none."""
        if self.data is None:
            return pretraining
        path = work / "data"
        if ranks.rank_and_size().is_first and not path.is_dir():
            with files.atomic_folder(path) as folder:
                self.data.write(folder)
        ranks.broadcast_text("prepared")  # the other ranks wait here
        return Prepared.open(path)

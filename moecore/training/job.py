"""One training: a model, the images that it learns from, and what it learns of them."""

from typing import NamedTuple

import numpy as np
from torch import nn

from moecore.core.streams import PERMUTED
from moecore.data.loader import OnDevice, OnDisk, to_device
from moecore.data.prepared import Prepared, Split
from moecore.nn.backbones.model import BackboneModel
from moecore.tasks import AnyTask
from moecore.training.guide import Guide
from moecore.training.isolation import Isolation
from moecore.training.objective import Objective


class Job(NamedTuple):
    """A model and what it learns from."""

    model: BackboneModel
    train: OnDevice | OnDisk
    validation: OnDevice | OnDisk
    objective: Objective
    guide: Guide | None = None  # a frozen teacher, for the losses that need one
    views: int = 1  # of each image
    isolation: Isolation | None = None  # which volumes keep one tissue

    @property
    def task(self) -> AnyTask:
        """What the model predicts."""
        return self.model.image.task

    @property
    def routers(self) -> list[nn.Parameter]:
        """Those of the teacher where they learn with the model."""
        if self.guide is None or not self.guide.learns:
            return []
        return list(self.guide.routers)

    @property
    def learners(self) -> nn.ModuleDict:
        """All that learns: the model, and the teacher's routers where they learn with it."""
        learners: dict[str, nn.Module] = {"model": self.model}
        if self.guide is not None and self.guide.learns:
            learners["teacher_routers"] = self.guide.routers
        return nn.ModuleDict(learners)


def job_for(
    model: BackboneModel,
    data: Prepared,
    objective: Objective,
    device: str,
    guide: Guide | None = None,
    subset: np.ndarray | None = None,
    views: int = 1,
    isolation: Isolation | None = None,
    permuted: int | None = None,
) -> Job:
    """The training of ``model`` on prepared data, on ``device``.

    subset: indices of the training images that are used. permuted: the seed of a null control,
    whose training labels change places.
    """
    train = data.train
    if subset is not None:
        train = Split(train.images[subset], train.labels[subset])
    if permuted is not None:
        places = np.random.default_rng([permuted, PERMUTED])
        train = Split(train.images, places.permutation(train.labels))
    if guide is not None:
        guide = guide.to(device)
    learned = to_device(train, device)
    validation = to_device(data.validation, device)
    return Job(model, learned, validation, objective, guide, views, isolation)

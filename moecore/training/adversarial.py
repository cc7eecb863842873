"""Adversarial training: a step learns from images that an attack has changed first.

Sources: Madry et al. (2018); adversarial-moe, §4.2.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.core.ranks import current_ranks
from moecore.core.routing_records import Batch
from moecore.core.streams import RowsOfBatch
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import eval_mode
from moecore.tasks.base import Task


class Adversarial(Config):
    """A PGD attack on the images of every step; the defaults are the paper's."""

    steps: int = Field(
        10, ge=1, description="of PGD on each batch; a training step costs as many more"
    )
    epsilon: float = Field(
        8 / 255, ge=0, le=1, description="radius of the L∞ ball; 0 changes nothing"
    )
    form: Literal["paper", "strong"] = Field(
        "paper", description="as the attack pgd has it; strong draws a random start"
    )

    def attacked(self, model: Model, task: Task, batch: Batch, generator: Generator) -> Batch:
        """The batch (every view of it) with adversarial images, fp32 in [0, 1].

        model: is attacked as it is used (no noise, no capacity, no autocast), and left as it was.
        generator: on the CPU, for the random start. Regularizers are not attacked.
        """
        attack = Pgd(steps=self.steps, form=self.form)
        own: Generator | list[Generator] = generator
        if self.form == "strong":  # the other form draws nothing
            own = local_image_generators(generator, batch.images)
        with eval_mode(model):  # the attack itself turns autocast off
            labels = model.targets(batch.labels).to(batch.images.device)
            images = attack(model, task, batch.images, labels, self.epsilon, own)
        return batch._replace(images=images)


def local_image_generators(generator: Generator, images: Tensor) -> Generator | list[Generator]:
    """Return what draws the random start of each of this rank's ``images``, as of a whole batch."""
    here = current_ranks()
    if here.size == 1:
        return generator
    states = []
    for _ in range(len(images) * here.size):
        states.append(generator.get_state())
        torch.rand(images.shape[1:], generator=generator)
    own = []
    for place in RowsOfBatch.of(torch.arange(len(states))).tolist():
        drawing = Generator()
        drawing.set_state(states[place])
        own.append(drawing)
    return own

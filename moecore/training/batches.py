"""What a training step learns from: a function of (seed, step), and of which ranks share it.

B images of the whole batch; a rank makes the pixels of its own images, and of those that are mixed
into them, but draws for all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.ranks import ranks
from moecore.core.records import Batch
from moecore.core.streams import ATTACK, VIEWS, Draws, generator_for
from moecore.data.loader import batch_indices, steps_per_epoch
from moecore.data.views.mix import mix
from moecore.data.views.views import make_views
from moecore.training.guide import standing_alone
from moecore.training.job import Job
from moecore.training.settings import Training


def training_batch(job: Job, settings: Training, seed: int, step: int) -> Batch:
    """The augmented batch of a step: a function of (seed, step) alone.

    With mixing the labels are (B, K) shares, else as the data set has them. Two views of each image
    are never mixed with other images: a patch would lose its partner (PRC, §IV).
    """
    made = rendered(job, settings, seed, step, ranks().rows(settings.batch))
    views, labels = made.images, made.labels
    if settings.mix is not None and job.views == 1:

        def others(places: Tensor) -> tuple[Tensor, Tensor]:
            partners = rendered(job, settings, seed, step, places)
            return partners.images, partners.labels

        # Of a whole batch the partners are there already.
        look = None if made.draws.rows is None else others
        views, labels = mix(views, labels, job.task, settings.mix, made.draws, look)
    batch = Batch(views, labels, made.affines, job.views)
    if job.isolation is None or made.region is None:
        return batch
    return job.isolation.marked(batch, made.region, made.epoch, job.model.layout)


class Rendered(NamedTuple):
    """Views of some images of a step's batch; the first views of all come before the second."""

    images: Tensor
    affines: Tensor
    labels: Tensor
    region: Tensor | None  # which tissue each keeps
    epoch: int
    draws: Draws  # whose generator has drawn the views


def rendered(job: Job, settings: Training, seed: int, step: int, places: Tensor | None) -> Rendered:
    """The views of the images at ``places`` of the batch; None for all of them."""
    draws = Draws(generator_for(seed, step, VIEWS), settings.batch, places)
    indices = draws.wanted(batch_indices(len(job.train.labels), settings.batch, seed, step))
    images, labels = job.train.take(indices)
    epoch = step // steps_per_epoch(len(job.train.labels), settings.batch)
    region = None
    if job.isolation is not None:
        images, region = job.isolation.isolated(images, indices, step, epoch, draws)
        region = region.repeat(job.views)
    made = [make_views(images, settings.views, draws) for _ in range(job.views)]
    views, affines = made[0]
    if job.views > 1:
        views = torch.cat([images for images, _ in made])
        affines = torch.cat([affines for _, affines in made])
    return Rendered(views, affines, torch.cat([labels] * job.views), region, epoch, draws)


def step_batch(job: Job, settings: Training, seed: int, step: int) -> Batch:
    """What a step learns from: the augmented batch, attacked where training is adversarial.

    The attack's draws are functions of (seed, step).
    """
    batch = training_batch(job, settings, seed, step)
    if settings.adversarial is None:
        return batch
    model = standing_alone(job.model, job.guide)
    return settings.adversarial.attacked(model, job.task, batch, generator_for(seed, step, ATTACK))

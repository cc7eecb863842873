"""The training loop: a generator that yields metrics, with no callbacks.

Order, views, mixing and router noise are functions of (seed, step). So a run is resumed from
weights, optimiser and a step number alone, and the same seed gives the same run.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moecore.core.records import Batch, Step
from moecore.core.streams import ATTACK, NOISE, VIEWS, generator_for
from moecore.data.loader import OnDevice, OnDisk, batch_indices, steps_per_epoch
from moecore.data.views.mix import mix
from moecore.data.views.views import make_views
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predictions
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import standing_alone
from moecore.training.job import Job
from moecore.training.meter import WEIGHED, Meter, held_in_training, taken
from moecore.training.optimizer import build_optimizer, learning_rate
from moecore.training.runtime import Runtime
from moecore.training.settings import Training


class Metrics(NamedTuple):
    """What is known after ``step`` of ``steps`` steps.

    values: raw loss terms, the mean score of the training and at an epoch's end of the validation
    images (``train_<…>``, ``validation_<…>``, see Task.logged), images per second; at the first
    point of a run ``memory_mb``, the most that a step holds (see ``peak_bytes``).
    """

    step: int
    steps: int
    epoch: float
    values: dict[str, float]


def fit(
    job: Job,
    settings: Training,
    seed: int,
    runtime: Runtime,
    checkpoint: Checkpoint | None = None,
) -> Iterator[Metrics]:
    """Train ``job.model`` in place; yield metrics every ``log_every`` steps and after every epoch.

    With a ``checkpoint`` the run goes on where it was killed. A checkpoint is written after the
    caller has taken the metrics of its step, so a caller that logs them never loses or repeats one.
    Raises UserError at a non-finite loss.
    """
    model = job.model.to(runtime.device)
    learners = job.learners
    optimizer = build_optimizer(model, settings, job.routers)
    per_epoch = steps_per_epoch(len(job.train.labels), settings.batch)
    steps = total_steps(job, settings)
    done, note = checkpoint.load(learners, optimizer) if checkpoint else (0, {})
    # A resumed run keeps the precision it began with, whatever a new probe would say.
    dtype = getattr(torch, note["dtype"]) if note else runtime.dtype(settings.precision)
    meter = Meter(torch.device(runtime.device), f"train_{job.task.logged}")
    saved = done
    for step in range(done, steps):
        model.train()
        rate = learning_rate(step, steps, settings.warmup_epochs * per_epoch, settings)
        batch = step_batch(job, settings, seed, step)
        torch.manual_seed(generator_for(seed, step, NOISE).initial_seed())
        update = partial(train_step, job, settings, optimizer, batch, rate, dtype, step / steps)
        held = held_in_training((learners, job.guide), optimizer, batch)
        terms, score = meter.weighed(update, held, step == min(WEIGHED, steps - 1))
        meter.add(step, len(batch.images) // batch.views, terms, score)
        after = step + 1
        if after % per_epoch == 0:
            end_epoch(model)
        if after % settings.log_every and after % per_epoch:
            continue
        values = taken(meter, model, after, rate, _last_checkpoint(checkpoint, saved))
        if after % per_epoch == 0:
            values |= validate(standing_alone(model, job.guide), job.validation)
        yield Metrics(after, steps, after / per_epoch, values)
        if checkpoint and after - saved >= settings.checkpoint_every and after < steps:
            name = str(dtype).removeprefix("torch.")
            checkpoint.save(after, learners, optimizer, {"dtype": name})
            saved = after
        meter.start()


def total_steps(job: Job, settings: Training) -> int:
    """Steps of the whole training; the incomplete batch at the end of an epoch is dropped."""
    return settings.epochs * steps_per_epoch(len(job.train.labels), settings.batch)


def training_batch(job: Job, settings: Training, seed: int, step: int) -> Batch:
    """The augmented batch of a step: a function of (seed, step) alone.

    With mixing the labels are (B, K) shares, else as the data set has them. Two views of each image
    are never mixed with other images: a patch would lose its partner (PRC, §IV).
    """
    generator = generator_for(seed, step, VIEWS)
    indices = batch_indices(len(job.train.labels), settings.batch, seed, step)
    images, labels = job.train.take(indices)
    epoch = step // steps_per_epoch(len(job.train.labels), settings.batch)
    region = None
    if job.isolation is not None:
        images, region = job.isolation.isolated(images, indices, step, epoch, generator)
    made = [make_views(images, settings.views, generator) for _ in range(job.views)]
    views, affines = made[0]
    if job.views > 1:
        views = torch.cat([images for images, _ in made])
        affines = torch.cat([affines for _, affines in made])
    labels = torch.cat([labels] * job.views)
    if settings.mix is not None and job.views == 1:
        views, labels = mix(views, labels, job.task, settings.mix, generator)
    batch = Batch(views, labels, affines, job.views)
    if job.isolation is None or region is None:
        return batch
    return job.isolation.marked(batch, region.repeat(job.views), epoch, job.model.layout)


def step_batch(job: Job, settings: Training, seed: int, step: int) -> Batch:
    """What a step learns from: the augmented batch, attacked where training is adversarial.

    The attack's draws are functions of (seed, step).
    """
    batch = training_batch(job, settings, seed, step)
    if settings.adversarial is None:
        return batch
    model = standing_alone(job.model, job.guide)
    return settings.adversarial.attacked(model, job.task, batch, generator_for(seed, step, ATTACK))


def end_epoch(model: nn.Module) -> None:
    """What parts do once per epoch: bases are made orthonormal again (ERMoE, supplement §11)."""
    for module in model.modules():
        reorthonormalise = getattr(module, "reorthonormalise", None)
        if reorthonormalise is not None:
            reorthonormalise()


def train_step(
    job: Job,
    settings: Training,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    dtype: torch.dtype,
    progress: float,
) -> tuple[dict[str, Tensor], Tensor]:
    """One update.

    Returns the detached terms (``loss`` is their weighted sum) and the sum of the scores of the
    batch's images, of which each view counts for its share.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        guidance = job.guide(batch.images) if job.guide is not None else None
        output = job.model(batch.images, guidance, progress)
    terms = job.objective.terms(Step(batch, output, job.model, guidance, progress))
    loss = job.objective.total(terms)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if settings.clip is not None:
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, settings.clip, foreach=True)
    optimizer.step()
    # Unchecked, and left on the device: a loss that is not finite is found at the next point.
    score = job.task.running(output.prediction.detach(), batch.labels, batch.learned)
    detached = {name: term.detach() for name, term in terms.items()}
    return {"loss": loss.detach()} | detached, score / batch.views


def validate(model: Model, split: OnDevice | OnDisk) -> dict[str, float]:
    """Mean score and mean loss on a split, in fp32 and evaluation mode."""
    prediction, _ = predictions(model, split.images, batch=500, routing=False)
    labels = split.labels.cpu()
    task = model.image.task
    return {
        f"validation_{task.logged}": task.mean_score(prediction, labels),
        "validation_loss": float(task.loss(prediction, labels)),
    }


def _last_checkpoint(checkpoint: Checkpoint | None, step: int) -> str:
    if checkpoint and step:
        return f"last good checkpoint: step {step} in {checkpoint.path}"
    return "no checkpoint was written yet"

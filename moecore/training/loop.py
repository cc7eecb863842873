"""The training loop: a generator that yields metrics, with no callbacks.

Order, views, mixing and router noise are functions of (seed, step). So a run is resumed from
weights, optimiser and a step number alone, and the same seed gives the same run.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.ranks import RowsOfBatch, joined, ranks, same_text
from moecore.core.records import Batch, Step
from moecore.core.streams import ATTACK, NOISE, VIEWS, Draws, generator_for
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

if TYPE_CHECKING:
    from moecore.training.spread import Spread


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

    Over several ranks each trains its part of every batch (see spread.py), and ``job.model`` is up
    to date, on all of them, at the end of an epoch.

    With a ``checkpoint`` the run goes on where it was killed. A checkpoint is written after the
    caller has taken the metrics of its step, so a caller that logs them never loses or repeats one.
    Raises UserError at a non-finite loss.
    """
    whole = job
    job.model.to(runtime.device)
    spread = None
    if joined():
        from moecore.training.spread import Spread  # half a second, for several ranks only

        spread = Spread(job, settings, runtime.device)
        job = spread.job
    elif settings.shard > 1:
        one = "there is one rank; allowed: 1, or more ranks"
        raise UserError(f"shard is {settings.shard}, and {one}")
    model = job.model
    learners = job.learners
    optimizer = build_optimizer(model, settings, job.routers)
    per_epoch = steps_per_epoch(len(job.train.labels), settings.batch)
    steps = total_steps(job, settings)
    done, note = checkpoint.load(learners, optimizer) if checkpoint else (0, {})
    # A resumed run keeps the precision it began with, whatever a new probe would say.
    name = note.get("dtype") or str(runtime.dtype(settings.precision)).removeprefix("torch.")
    name = same_text(name)
    dtype = getattr(torch, name)
    meter = Meter(torch.device(runtime.device), f"train_{job.task.logged}")
    saved = done
    make = partial(training_batch, job, settings, seed)
    taken_for = Ahead(make, range(done, steps)) if runtime.device != "cpu" else make
    for step in range(done, steps):
        model.train()
        rate = learning_rate(step, steps, settings.warmup_epochs * per_epoch, settings)
        batch = attacked(job, settings, seed, step, taken_for(step))
        torch.manual_seed(generator_for(seed, step, NOISE).initial_seed())
        update = partial(
            train_step, job, settings, optimizer, batch, rate, dtype, step / steps, spread
        )
        held = held_in_training((learners, job.guide), optimizer, batch)
        weigh = spread is None and step == min(WEIGHED, steps - 1)
        terms, score = meter.weighed(update, held, weigh)
        meter.add(step, len(batch.images) // batch.views, terms, score)
        after = step + 1
        if after % per_epoch == 0:
            if spread is not None:
                spread.gather()
            end_epoch(whole.model)
            if spread is not None:
                spread.scatter()
        if after % settings.log_every and after % per_epoch:
            continue
        values = taken(meter, model, after, rate, _last_checkpoint(checkpoint, saved))
        if after % per_epoch == 0 and ranks().first:
            values |= validate(standing_alone(whole.model, job.guide), job.validation)
        yield Metrics(after, steps, after / per_epoch, values)
        if checkpoint and after - saved >= settings.checkpoint_every and after < steps:
            checkpoint.save(after, learners, optimizer, {"dtype": name})
            saved = after
        meter.start()
    if checkpoint:
        checkpoint.wait()


def total_steps(job: Job, settings: Training) -> int:
    """Steps of the whole training; the incomplete batch at the end of an epoch is dropped."""
    return settings.epochs * steps_per_epoch(len(job.train.labels), settings.batch)


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
    spread: "Spread | None" = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """One update.

    Returns the detached terms (``loss`` is their weighted sum) and the sum of the scores of the
    batch's images, of which each view counts for its share.
    """
    RowsOfBatch.views = batch.views
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        guidance = job.guide(batch.images) if job.guide is not None else None
        output = job.model(batch.images, guidance, progress)
    terms = job.objective.terms(Step(batch, output, job.model, guidance, progress))
    loss = job.objective.total(terms)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if spread is not None:
        spread.step(optimizer, settings.clip)
    else:
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
    return attacked(job, settings, seed, step, training_batch(job, settings, seed, step))


def attacked(job: Job, settings: Training, seed: int, step: int, batch: Batch) -> Batch:
    """The batch of a step as the model is to learn from it; see ``step_batch``."""
    if settings.adversarial is None:
        return batch
    model = standing_alone(job.model, job.guide)
    return settings.adversarial.attacked(model, job.task, batch, generator_for(seed, step, ATTACK))


class Ahead:
    """``make(step)`` for ``steps`` in their order, made by a thread while the device computes.

    What a step draws is a function of its number, so it may be drawn early. Errors of ``make`` are
    raised where the step's turn is.
    """

    def __init__(self, make: Callable[[int], Batch], steps: range, depth: int = 2) -> None:
        """depth: steps that are made before their turn."""
        card = torch.cuda.current_device() if torch.cuda.is_available() else None
        chosen = (torch.cuda.set_device, (card,)) if card is not None else (None, ())
        self.pool = ThreadPoolExecutor(1, "batches", *chosen)  # a thread begins with the first card
        self.make = make
        self.steps = steps
        self.depth = depth
        self.waiting: dict[int, Future[Batch]] = {}

    def __call__(self, step: int) -> Batch:
        for later in range(step, min(step + self.depth + 1, self.steps.stop)):
            if later not in self.waiting:
                self.waiting[later] = self.pool.submit(self.make, later)
        return self.waiting.pop(step).result()

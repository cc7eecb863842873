"""The training loop: a generator that yields metrics, with no callbacks.

Order, views, mixing and router noise are functions of (seed, step). So a run is resumed from
weights, optimiser and a step number alone, and the same seed gives the same run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from moecore.core.files import UserError
from moecore.core.ranks import broadcast_text, current_ranks, has_process_group
from moecore.core.routing_records import Batch, Guidance, ModelOutput, ObjectiveInputs
from moecore.core.streams import NOISE, RowsOfBatch, generator_for
from moecore.data.loader import Loaded
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches, text_block_scores
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import attach_required_guide
from moecore.training.job import BatchPrefetcher, TrainingJob, apply_adversarial, training_batch
from moecore.training.meter import (
    WEIGHED,
    Meter,
    check_finite_predictions,
    live_training_tensors,
    take_and_check_metrics,
)
from moecore.training.monitor import LayerTotals, Monitor
from moecore.training.runtime import CompiledBlocks, Runtime, iterate_traced_steps
from moecore.training.settings import Training, build_optimizer, learning_rate
from moecore.training.sharded_state import optimizer_parameters

if TYPE_CHECKING:
    from moecore.training.distributed_training import DistributedTraining


class Metrics(NamedTuple):
    """What is known after ``step`` of ``steps`` steps.

    values: raw loss terms, the mean score of the training and at an epoch's end of the validation
    images (``train_<…>``, ``validation_<…>``, see Task.logged), images per second; at the first
    point of a run ``memory_mb``, the most that a step holds (see ``measure_peak``).
    routing: of each MoE layer since the last point, where a monitor asks for it.
    """

    step: int
    steps: int
    epoch: float
    values: dict[str, float]
    routing: dict[str, LayerTotals]


def iterate_training(
    job: TrainingJob,
    settings: Training,
    seed: int,
    runtime: Runtime,
    checkpoint: Checkpoint | None = None,
    trace: Path | None = None,
    monitor: Monitor | None = None,
) -> Iterator[Metrics]:
    """Train ``job.model`` in place; yield metrics every ``log_every`` steps and after every epoch.

    Over several ranks each trains its part of every batch (see distributed_training.py), and
    ``job.model`` is up to date, on all of them, at the end of an epoch. With a ``checkpoint`` the
    run goes on where it was killed; one is written after the caller has taken the metrics of its
    step, so none is lost or repeated. trace: the file of a trace of a few steps. monitor: how often
    routing is counted; None: never. Raises UserError at a non-finite loss.
    """
    spread = spread_over_ranks(job, settings, runtime.device)
    whole, job = job, job if spread is None else spread.job
    optimizer = build_optimizer(job.model, settings, job.routers)
    per_epoch = job.updates(settings)
    steps = total_steps(job, settings)
    saved, note = checkpoint.load(job.learners, optimizer) if checkpoint else (0, {})
    precision = agreed_precision(note, settings, runtime)
    dtype = getattr(torch, precision)
    meter = Meter(torch.device(runtime.device), f"train_{job.task.history_name}", monitor)
    batch_of = batch_maker(job, settings, seed, range(saved, steps), runtime.device)
    blocks = CompiledBlocks([job.model, job.guide], runtime.compile, steps - saved)
    for step in iterate_traced_steps(range(saved, steps), trace, runtime.device):
        rate = learning_rate(step, steps, settings.warmup_epochs * per_epoch, settings)
        batch = batch_of(step)
        torch.manual_seed(generator_for(seed, step, NOISE).initial_seed())
        held = live_training_tensors((job.learners, job.guide), optimizer, batch)
        is_weighed = spread is None and step == min(WEIGHED, steps - 1)
        with blocks.inside(), meter.memory(held, when=is_weighed):
            terms, score, output = train_step(
                job, settings, optimizer, batch, rate, dtype, step / steps, spread
            )
        meter.add(step, len(batch.images) // batch.views, terms, score, output)
        del output  # its memory is free again before the next step
        after = step + 1
        if after % per_epoch == 0:
            reorthonormalise_bases(whole.model, spread)
        if after % settings.log_every and after % per_epoch:
            continue
        values, routing = take_and_check_metrics(
            meter, job.model, after, rate, _last_checkpoint(checkpoint, saved)
        )
        if after % per_epoch == 0 and current_ranks().first:
            values |= validation_metrics(
                attach_required_guide(whole.model, job.guide), job.validation
            )
        yield Metrics(after, steps, after / per_epoch, values, routing)
        # The last step is always kept: what follows the training may still refuse or be killed.
        if checkpoint and (after - saved >= settings.checkpoint_every or after == steps):
            checkpoint.save(after, job.learners, optimizer, {"dtype": precision})
            saved = after
        meter.start()
    if checkpoint:
        checkpoint.wait()


def spread_over_ranks(
    job: TrainingJob, settings: Training, device: str
) -> "DistributedTraining | None":
    """Put the model on its device; this rank's part, or None. UserError if it does not divide."""
    job.model.to(device)
    if has_process_group():
        from moecore.training.distributed_training import (
            DistributedTraining,  # half a second, for several ranks only
        )

        return DistributedTraining(job, settings, device)
    for key in ("shard", "expert_parallel"):
        if getattr(settings, key) > 1:
            one = "there is one rank; allowed: 1, or more ranks"
            raise UserError(f"{key} is {getattr(settings, key)}, and {one}")
    return None


def agreed_precision(note: dict, settings: Training, runtime: Runtime) -> str:
    """The autocast dtype's name, the first rank's; a resumed run keeps its own."""
    probed = str(runtime.dtype(settings.precision)).removeprefix("torch.")
    return broadcast_text(note.get("dtype", probed))


def batch_maker(
    job: TrainingJob, settings: Training, seed: int, steps: range, device: str
) -> Callable[[int], Batch]:
    """Return what makes the batch of a step; beside a GPU, with a thread that is ahead of it."""
    make = partial(training_batch, job, settings, seed)
    made = make if device == "cpu" else BatchPrefetcher(make, steps)

    def batch_of(step: int) -> Batch:
        with record_function("batch"):
            return apply_adversarial(job, settings, seed, step, made(step))

    return batch_of


def total_steps(job: TrainingJob, settings: Training) -> int:
    """Steps of the whole training; the incomplete batch at the end of an epoch is dropped."""
    return settings.epochs * job.updates(settings)


def reorthonormalise_bases(model: nn.Module, spread: "DistributedTraining | None" = None) -> None:
    """Run what parts do once per epoch: bases are made orthonormal again (ERMoE, supplement §11).

    model: the whole one, which ``spread`` brings up to date before and takes over afterwards.
    """
    if spread is not None:
        spread.gather()
    for module in model.modules():
        getattr(module, "reorthonormalise", lambda: None)()
    if spread is not None:
        spread.scatter()


def train_step(
    job: TrainingJob,
    settings: Training,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    dtype: torch.dtype,
    progress: float,
    spread: "DistributedTraining | None" = None,
) -> tuple[dict[str, Tensor], Tensor, ModelOutput]:
    """One update.

    Returns the detached terms (``loss`` is their weighted sum), the sum of the scores of the
    batch's images, of which each view counts for its share, and what the model said.
    """
    job.model.train()
    RowsOfBatch.views = batch.views
    if batch.anew:
        job.model.begin_streams()
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        with record_function("teacher"):
            guidance = job.guide(batch.images) if job.guide is not None else None
        with record_function("forward"):
            output, batch = forward_and_embed_labels(job, batch, guidance, progress)
    with record_function("losses"):
        seen = ObjectiveInputs(batch, output, job.model, guidance, progress)
        terms = job.objective.terms(seen)
        loss = job.objective.total(terms)
    optimizer.zero_grad(set_to_none=True)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        if spread is not None:
            spread.reduce_gradients(optimizer, settings.clip)
        elif settings.clip is not None:
            nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), settings.clip, foreach=True)
        optimizer.step()
        job.model.end_step(output, progress)
    # Unchecked, and left on the device: a loss that is not finite is found at the next point.
    detached = {name: term.detach() for name, term in terms.items()}
    score = job.objective.score(seen, terms) / batch.views
    return {"loss": loss.detach()} | detached, score, output


def forward_and_embed_labels(
    job: TrainingJob, batch: Batch, guidance: Guidance | None, progress: float
) -> tuple[ModelOutput, Batch]:
    """Return what the model says, and the batch with what the task compares it with."""
    read = job.model.beside(batch.labels)
    output = job.model(batch.images, guidance, progress, *read)
    if output.target is None:
        return output, batch
    return output, batch._replace(labels=output.target)


def validation_metrics(model: Model, split: Loaded) -> dict[str, float]:
    """Mean score and mean loss on a split, in fp32 and evaluation mode."""
    labels = split.labels.cpu()
    task = model.image.task
    if task.long:
        mean = float(text_block_scores(model, split.images, labels).mean())
        return {f"validation_{task.history_name}": mean, "validation_loss": mean}
    prediction, _ = predict_in_batches(model, split.images, batch=500, routing=False)
    check_finite_predictions(prediction, "validation")
    labels = model.targets(labels)
    return {
        f"validation_{task.history_name}": task.mean_score(prediction, labels),
        "validation_loss": float(task.loss(prediction, labels)),
    }


def _last_checkpoint(checkpoint: Checkpoint | None, step: int) -> str:
    if checkpoint and step:
        return f"last good checkpoint: step {step} in {checkpoint.path}"
    return "no checkpoint was written yet"

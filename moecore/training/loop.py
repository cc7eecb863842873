"""The training loop: a generator that yields metrics, without callbacks."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from moecore.core.files import UserError
from moecore.core.ranks import broadcast_text, has_process_group, rank_and_size
from moecore.core.routing_records import Batch, Guidance, ModelOutput, ObjectiveInputs
from moecore.core.streams import ATTACK, NOISE, generator_for
from moecore.data.loader import LoadedSplit
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches, score_last_blocks
from moecore.training.artifacts import Checkpoint
from moecore.training.distributed_training import ShardedReplica, optimizer_parameters
from moecore.training.job import BatchPrefetcher, TrainingJob, training_batch
from moecore.training.meter import (
    MEMORY_STEP,
    Meter,
    average_and_check_metrics,
    check_finite_predictions,
    live_training_tensors,
)
from moecore.training.monitor import LayerTotals, MonitorSettings
from moecore.training.runtime import CompiledBlocks, Runtime, iterate_traced_steps
from moecore.training.settings import Training, build_optimizer, learning_rate
from moecore.training.step_graph import GraphedStepRunner, StepInputs, StepOutput


class Metrics(NamedTuple):
    step: int
    steps: int
    epoch: float
    # unweighted loss terms; mean score of the training images, and at the end of an epoch of the
    # validation images (see ``Task.history_name``); images per second; at the first point
    # ``memory_mb``, the peak memory of a step
    values: dict[str, float]
    routing: dict[str, LayerTotals]  # of each MoE layer since the last point, with a monitor


def iterate_training(
    job: TrainingJob,
    settings: Training,
    seed: int,
    runtime: Runtime,
    checkpoint: Checkpoint | None = None,
    trace: Path | None = None,  # file for a trace of a few steps
    monitor: MonitorSettings | None = None,  # how often routing is counted; None: never
) -> Iterator[Metrics]:
    """Train ``job.model`` in place; yield metrics every ``log_every`` steps and each epoch."""
    # Each of several ranks trains on a part of every batch; ``job.model`` is updated at the end
    # of an epoch. Checkpoints follow the step's metrics, so that a resumed run repeats none.
    replica = place_and_shard(job, settings, runtime.device)
    full_model = job.model
    job = job if replica is None else replica.job
    optimizer = build_optimizer(job.model, settings, job.learned_teacher_routers)
    per_epoch = job.updates_per_epoch(settings)
    steps = total_steps(job, settings)
    saved, note = checkpoint.load(job.learners, optimizer) if checkpoint else (0, {})
    probed = str(runtime.dtype(settings.precision)).removeprefix("torch.")
    precision = broadcast_text(note.get("dtype", probed))  # the checkpoint's, or the first rank's
    dtype = getattr(torch, precision)
    meter = Meter(torch.device(runtime.device), f"train_{job.task.history_name}", monitor)
    batch_of = batch_maker(job, settings, seed, range(saved, steps), runtime.device)
    blocks = CompiledBlocks([job.model, job.guide], runtime.compile, steps - saved)

    def run_step(inputs: StepInputs) -> StepOutput:
        batch, rate, progress, _ = inputs
        with blocks.using_compiled_blocks():
            return train_step(job, settings, optimizer, batch, rate, dtype, progress, replica)

    graph = GraphedStepRunner(job, optimizer, run_step, runtime.graph)
    for step in iterate_traced_steps(range(saved, steps), trace, runtime.device):
        rate = learning_rate(step, steps, settings.warmup_epochs * per_epoch, settings)
        batch = batch_of(step)
        noise = generator_for(seed, step, NOISE).initial_seed()
        tensors = live_training_tensors((job.learners, job.guide), optimizer, batch)
        is_measured = replica is None and step == min(MEMORY_STEP, steps - 1)
        with meter.measuring_memory(tensors, is_measured):
            terms, score, output = graph.take(StepInputs(batch, rate, step / steps, noise))
        meter.add(step, len(batch.images) // batch.views, terms, score, output)
        del output  # free its memory before the next step
        after = step + 1
        if after % per_epoch == 0:
            reorthonormalise_bases(full_model, replica)
        if after % settings.log_every and after % per_epoch:
            continue
        last = _describe_last_checkpoint(checkpoint, saved)
        values, routing = average_and_check_metrics(meter, job.model, after, rate, last)
        if after % per_epoch == 0 and rank_and_size().is_first:
            model = job._replace(model=full_model).complete_model
            values |= validation_metrics(model, job.validation)
        yield Metrics(after, steps, after / per_epoch, values, routing)
        # The last step is always saved: the stage may still fail after the training.
        if checkpoint and (after - saved >= settings.checkpoint_every or after == steps):
            checkpoint.save(after, job.learners, optimizer, {"dtype": precision})
            saved = after
        meter.start()
    if checkpoint:
        checkpoint.wait()


def place_and_shard(job: TrainingJob, settings: Training, device: str) -> ShardedReplica | None:
    """Move the model to ``device``; return its sharded replica, or None with one rank."""
    job.model.to(device)
    if has_process_group():
        return ShardedReplica(job, settings, device)
    for key in ("shard", "expert_parallel"):
        if getattr(settings, key) > 1:
            raise UserError(
                f"{key} is {getattr(settings, key)}, and there is one rank; allowed: 1, or more "
                "ranks"
            )
    return None


def batch_maker(
    job: TrainingJob, settings: Training, seed: int, steps: range, device: str
) -> Callable[[int], Batch]:
    """Return a function step → batch; for a GPU, a thread makes the batches of ``steps`` ahead."""
    make: Callable[[int], Batch] = partial(training_batch, job, settings, seed)
    if device != "cpu":
        make = BatchPrefetcher(make, steps)

    def batch_of(step: int) -> Batch:
        with record_function("batch"):
            batch = make(step)
            if settings.adversarial is None:
                return batch
            generator = generator_for(seed, step, ATTACK)
            return settings.adversarial.attacked(job.complete_model, job.task, batch, generator)

    return batch_of


def total_steps(job: TrainingJob, settings: Training) -> int:
    """Return the number of steps; an incomplete batch at the end of an epoch is dropped."""
    return settings.epochs * job.updates_per_epoch(settings)


def reorthonormalise_bases(model: nn.Module, replica: ShardedReplica | None) -> None:
    """Make bases of experts and routers orthonormal again (every epoch; ERMoE, supplement §11)."""
    if replica is not None:
        replica.gather()
    for module in model.modules():
        reorthonormalise = getattr(module, "reorthonormalise", None)
        if reorthonormalise is not None:
            reorthonormalise()
    if replica is not None:
        replica.scatter()


def train_step(
    job: TrainingJob,
    settings: Training,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float | Tensor,  # learning rate; a captured step reads it from a tensor
    dtype: torch.dtype,
    progress: float,  # share of the training that is done
    replica: ShardedReplica | None = None,
) -> StepOutput:
    """Make one update of the model; return detached terms, summed scores and the model's output."""
    # The term ``loss``: the weighted sum of the others. Scores are averaged over an image's views.
    job.model.train()
    if batch.anew:
        job.model.begin_streams()
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        with record_function("teacher"):
            guidance = job.guide(batch.images) if job.guide is not None else None
        with record_function("forward"):
            output, batch = forward_and_embed_captions(job, batch, guidance, progress)
    with record_function("losses"):
        inputs = ObjectiveInputs(batch, output, job.model, guidance, progress)
        terms = job.objective.terms(inputs)
        loss = job.objective.total(terms)
    optimizer.zero_grad(set_to_none=True)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        if replica is not None:
            replica.reduce_and_clip(optimizer, settings.clip)
        elif settings.clip is not None:
            nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), settings.clip, foreach=True)
        optimizer.step()
        job.model.end_step(output, progress)
    # Not checked and not copied to the host: a non-finite loss is found at the next logged point.
    detached = {"loss": loss.detach()} | {name: term.detach() for name, term in terms.items()}
    return detached, job.objective.score(inputs, terms) / batch.views, output


def forward_and_embed_captions(
    job: TrainingJob, batch: Batch, guidance: Guidance | None, progress: float
) -> tuple[ModelOutput, Batch]:
    """Return the model's output, and ``batch`` with embedded captions instead of its labels."""
    captions = job.model.beside(batch.labels)  # () for a model of images only
    output = job.model(batch.images, guidance, progress, *captions)
    if output.target is None:
        return output, batch
    return output, batch._replace(labels=output.target)


def validation_metrics(model: Model, split: LoadedSplit) -> dict[str, float]:
    """Return ``validation_loss`` and ``validation_<score>``, means over a split, in fp32."""
    labels = split.labels.cpu()
    task = model.image.task
    if task.long:
        mean = float(score_last_blocks(model, split.images, labels).mean())
        return {f"validation_{task.history_name}": mean, "validation_loss": mean}
    prediction, _ = predict_in_batches(model, split.images, batch=500, routing=False)
    check_finite_predictions(prediction, "validation")
    labels = model.targets(labels)
    return {
        f"validation_{task.history_name}": task.mean_score(prediction, labels),
        "validation_loss": float(task.loss(prediction, labels)),
    }


def _describe_last_checkpoint(checkpoint: Checkpoint | None, step: int) -> str:
    if checkpoint and step:
        return f"last good checkpoint: step {step} in {checkpoint.path}"
    return "no checkpoint was written yet"

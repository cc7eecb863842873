"""The training loop: a generator that yields metrics, with no callbacks.

Order, views, mixing and router noise are functions of (seed, step). So a run is resumed from weights, optimiser and a
step number alone, and the same seed gives the same run.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moecore.data.loader import OnDevice, OnDisk, batch_indices, generator_for, steps_per_epoch
from moecore.data.mix import mix
from moecore.data.views import make_views
from moecore.evaluation.classification import correct
from moecore.evaluation.predict import predictions
from moecore.evaluation.regression import mae
from moecore.files import StageError
from moecore.records import Batch, Step, real
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import Guide, standing_alone
from moecore.training.objective import Objective, task_loss
from moecore.training.optimizer import build_optimizer, learning_rate
from moecore.training.runtime import Runtime
from moecore.training.settings import Training
from moecore.training.isolation import Isolation


VIEWS, NOISE, ATTACK = 1, 2, 3  # purposes of the random streams; 0 is the order of the images


class Metrics(NamedTuple):
    """What is known after ``step`` of ``steps`` steps: raw loss terms, accuracies in [0, 1] (for real labels mean absolute errors in their unit), images per second."""

    step: int
    steps: int
    epoch: float
    values: dict[str, float]


class Task(NamedTuple):
    """A model and what it learns from; ``guide`` is a frozen teacher for the losses that need one, ``views`` how many of each image, ``isolation`` which volumes keep one tissue."""

    model: nn.Module
    classes: int
    train: OnDevice | OnDisk
    validation: OnDevice | OnDisk
    objective: Objective
    guide: Guide | None = None
    views: int = 1
    isolation: Isolation | None = None

    @property
    def learners(self) -> nn.Module:
        """All that learns: the model, and the teacher's routers where they learn with it."""
        routers = {"teacher_routers": self.guide.routers} if self.guide is not None and self.guide.learns else {}
        return nn.ModuleDict({"model": self.model} | routers)


def fit(task: Task, settings: Training, seed: int, runtime: Runtime, checkpoint: Checkpoint | None = None) -> Iterator[Metrics]:
    """Train ``task.model`` in place and yield metrics every ``log_every`` steps and at the end of every epoch.

    With a ``checkpoint`` the run goes on where it was killed. A checkpoint is written after the caller has taken the
    metrics of its step, so a caller that logs them never loses or repeats one. Raises StageError at a non-finite loss.
    """
    model, device = task.model.to(runtime.device), torch.device(runtime.device)
    routers = list(task.guide.routers) if task.guide is not None and task.guide.learns else []
    learners, optimizer = task.learners, build_optimizer(model, settings, routers)
    per_epoch, steps = steps_per_epoch(len(task.train.labels), settings.batch), total_steps(task, settings)
    done, note = checkpoint.load(learners, optimizer) if checkpoint else (0, {})
    dtype = getattr(torch, note["dtype"]) if note else runtime.dtype(settings.precision)
    meter, saved = Meter(device, "train_mae" if real(task.train.labels) else "train_accuracy"), done
    for step in range(done, steps):
        model.train()
        rate = learning_rate(step, steps, settings.warmup_epochs * per_epoch, settings)
        batch = step_batch(task, settings, seed, step)
        torch.manual_seed(generator_for(seed, step, NOISE).initial_seed())
        meter.add(step, len(batch.images) // batch.views, *train_step(task, settings, optimizer, batch, rate, dtype, step / steps))
        after = step + 1
        if after % per_epoch == 0:
            end_epoch(model)
        if after % settings.log_every and after % per_epoch:
            continue
        values = meter.take(_last_checkpoint(checkpoint, saved)) | {"learning_rate": rate}
        _check_weights(model, after, values, _last_checkpoint(checkpoint, saved))
        if after % per_epoch == 0:
            values |= validate(standing_alone(model, task.guide), task.validation)
        yield Metrics(after, steps, after / per_epoch, values)
        if checkpoint and after - saved >= settings.checkpoint_every and after < steps:
            checkpoint.save(after, learners, optimizer, {"dtype": str(dtype).removeprefix("torch.")})
            saved = after
        meter.start()


def total_steps(task: Task, settings: Training) -> int:
    """Steps of the whole training; the incomplete batch at the end of an epoch is dropped."""
    return settings.epochs * steps_per_epoch(len(task.train.labels), settings.batch)


def training_batch(task: Task, settings: Training, seed: int, step: int) -> Batch:
    """The augmented batch of a step: a function of (seed, step) alone. With mixing the labels are (B, K) shares, else as the data set has them.

    Two views of each image are never mixed with other images: a patch would lose its partner (PRC, §IV).
    """
    generator = generator_for(seed, step, VIEWS)
    indices = batch_indices(len(task.train.labels), settings.batch, seed, step)
    images, labels = task.train.take(indices)
    if task.isolation is not None:
        epoch = step // steps_per_epoch(len(task.train.labels), settings.batch)
        images, region = task.isolation.isolated(images, indices, step, epoch, generator)
    made = [make_views(images, settings.views, generator) for _ in range(task.views)]
    views, affines = (torch.cat(parts) if task.views > 1 else parts[0] for parts in zip(*made, strict=True))
    labels = torch.cat([labels] * task.views)
    if settings.mix is not None and task.views == 1:
        views, labels = mix(views, labels, task.classes, settings.mix, generator)
    batch = Batch(views, labels, affines, task.views)
    return batch if task.isolation is None else task.isolation.marked(batch, region.repeat(task.views), epoch, task.model.layout)


def step_batch(task: Task, settings: Training, seed: int, step: int) -> Batch:
    """What a step learns from: the augmented batch, attacked where training is adversarial; the attack's draws are functions of (seed, step)."""
    batch = training_batch(task, settings, seed, step)
    if settings.adversarial is None:
        return batch
    return settings.adversarial.attacked(standing_alone(task.model, task.guide), batch, generator_for(seed, step, ATTACK))


def end_epoch(model: nn.Module) -> None:
    """What parts do once per epoch: bases are made orthonormal again (ERMoE, supplement §11)."""
    for module in model.modules():
        if hasattr(module, "reorthonormalise"):
            module.reorthonormalise()


def train_step(
    task: Task, settings: Training, optimizer: torch.optim.Optimizer, batch: Batch, rate: float, dtype: torch.dtype, progress: float
) -> tuple[dict[str, Tensor], Tensor]:
    """One update. Returns the detached terms (``loss`` is their weighted sum) and the number of correct predictions.

    For real labels the second is the sum of the absolute errors, in their unit.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        guidance = task.guide(batch.images) if task.guide is not None else None
        output = task.model(batch.images, guidance, progress)
    terms = task.objective.terms(Step(batch, output, task.model, guidance, progress))
    loss = task.objective.total(terms)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if settings.clip is not None:
        nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], settings.clip, foreach=True)
    optimizer.step()
    return {"loss": loss.detach()} | {name: term.detach() for name, term in terms.items()}, _hits(output.prediction.detach(), batch) / batch.views


def _hits(prediction: Tensor, batch: Batch) -> Tensor:
    """The number of correct predictions, or the sum of |ŷ − y| for real labels; on the device, unchecked: a loss that is not finite is found later.

    Of the images that the task is learned from, as if all of the batch were like them.
    """
    labels = batch.labels
    if real(labels):
        errors = (prediction[:, 0].float() - labels).abs()
        return (errors if batch.learned is None else errors[batch.learned]).mean() * len(labels)
    return correct(prediction, labels.argmax(dim=-1) if labels.is_floating_point() else labels).sum()  # of mixed images the larger share


def validate(model: nn.Module, split: OnDevice | OnDisk) -> dict[str, float]:
    """Accuracy (precision at 1 where images have several labels, mean absolute error of real ones) and mean task loss on a split, in fp32 and evaluation mode."""
    logits, _ = predictions(model, split.images, batch=500, routing=False)
    labels = split.labels.cpu()
    if real(labels):
        return {"validation_mae": mae(logits, labels), "validation_loss": float(task_loss(logits, labels, unit=model.image.target_std))}
    return {"validation_accuracy": float(correct(logits, labels).float().mean()), "validation_loss": float(task_loss(logits, labels))}


class Meter:
    """Sums on the device between two logged points, read once each time: no host synchronisation in a step."""

    def __init__(self, device: torch.device, measure: str = "train_accuracy") -> None:
        """``measure``: the name of the mean, per image, of the second result of a step."""
        self.device, self.measure = device, measure
        self.start()

    def start(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.images, self.count, self.begun = 0, 0, time.perf_counter()
        self.first_bad = torch.full((), torch.iinfo(torch.int64).max, device=self.device)

    def add(self, step: int, images: int, terms: dict[str, Tensor], correct: Tensor) -> None:
        for name, value in (terms | {"correct": correct}).items():
            self.sums[name] = self.sums.get(name, 0) + value.double()
        self.first_bad = torch.where(torch.isfinite(terms["loss"]), self.first_bad, self.first_bad.clamp(max=step + 1))
        self.images, self.count = self.images + images, self.count + 1

    def take(self, last_good: str) -> dict[str, float]:
        """The means since the last point. Raises StageError where a loss was not finite."""
        sums = {name: float(value) for name, value in self.sums.items()}
        correct = sums.pop("correct")
        means = {name: value / self.count for name, value in sums.items()}
        if self.first_bad < torch.iinfo(torch.int64).max:
            raise StageError(f"the loss is not finite since step {int(self.first_bad)} ({_shown(means)}); {last_good}. Lower the learning rate or a weight")
        seconds = time.perf_counter() - self.begun
        return means | {self.measure: correct / self.images, "images_per_second": self.images / seconds}


def _check_weights(model: nn.Module, step: int, values: dict[str, float], last_good: str) -> None:
    """A finite loss can leave weights that are not; such weights must not become a checkpoint or a result."""
    if not torch.stack([parameter.detach().sum() for parameter in model.parameters()]).isfinite().all():
        raise StageError(f"the weights are not finite after step {step} ({_shown(values)}); {last_good}. Lower the learning rate or a weight")


def _shown(means: dict[str, float]) -> str:
    return "means since the last logged point: " + ", ".join(f"{name} {value:.4g}" for name, value in means.items())


def _last_checkpoint(checkpoint: Checkpoint | None, step: int) -> str:
    return f"last good checkpoint: step {step} in {checkpoint.path}" if checkpoint and step else "no checkpoint was written yet"

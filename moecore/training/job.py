"""One training: a model, its images, and the loss of a step, term by term.

A rank draws for the whole batch, but makes only its own pixels and those mixed into them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.core.ranks import has_process_group, mean_over_ranks, rank_and_size
from moecore.core.routing_records import Batch, ModelOutput, ObjectiveInputs, RoutingRecord
from moecore.core.streams import PERMUTED_LABELS, VIEWS, BatchDraws, generator_for
from moecore.data import loader, prepared
from moecore.data.views.random_views import make_random_views, mix_batch
from moecore.nn.backbones.base_model import BackboneModel, Model
from moecore.tasks.base import Task
from moecore.training.method import Guide, attach_required_guide
from moecore.training.regularizers.base import Regularizer
from moecore.training.settings import Training
from moecore.training.single_tissue_volumes import TissueIsolationSchedule


class Objective(NamedTuple):
    """The loss of a training: the task's plus weighted regularizers."""

    regularizers: Sequence[Regularizer] = ()
    label_smoothing: float = 0.0
    distillation: float = 0.0  # share of DeiT's hard distillation (Touvron et al. 2021, eq. 3)
    text: Sequence[Regularizer] = ()  # on the routing of captions

    def terms(self, step: ObjectiveInputs) -> dict[str, Tensor]:
        """Return name → unweighted term of the loss, a scalar; ``penalty``: routers' own losses."""
        output = step.output
        labels = step.batch.labels
        if self.distillation:
            output = output._replace(prediction=output.heads[0])
        if (learned := step.batch.learned) is not None:
            heads = tuple(head[learned] for head in output.heads)
            output = output._replace(prediction=output.prediction[learned], heads=heads)
            labels = labels[learned]
        loss_of = step.model.task_loss
        if step.batch.learned is not None and has_process_group():
            # The number of images that teach the task differs between ranks.
            losses = loss_of(output, labels, self.label_smoothing, reduction="none")
            terms = {"task": mean_over_ranks(losses)}
        else:
            terms = {"task": loss_of(output, labels, self.label_smoothing)}
        if self.distillation:
            terms["distillation"] = hard_distillation_loss(step)
        terms |= {regularizer.kind: regularizer(step) for regularizer in self.regularizers}
        if self.text:
            captions = step._replace(output=step.output._replace(routing=step.output.text_routing))
            terms |= {f"text_{loss.kind}": loss(captions) for loss in self.text}
        records = (*output.routing, *output.text_routing)
        if any(record.penalty is not None for record in records):
            terms["penalty"] = sum_router_own_losses(records)
        return terms

    def score(self, step: ObjectiveInputs, terms: dict[str, Tensor]) -> Tensor:
        """Return the task's score summed over the batch's images; it may be infinite or NaN."""
        task = step.model.image.task
        batch = step.batch
        if task.long and not self.label_smoothing:  # score = loss; saves a pass over 100 MB
            return terms["task"].detach() * len(batch.labels)
        return task.running(step.output.prediction.detach(), batch.labels, batch.learned)

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        task = terms["task"]
        if self.distillation:
            task = (1 - self.distillation) * task + self.distillation * terms["distillation"]
        if "penalty" in terms:
            task = task + terms["penalty"]
        task = task + sum(loss.weight * terms[f"text_{loss.kind}"] for loss in self.text)
        return task + sum(loss.weight * terms[loss.kind] for loss in self.regularizers)


def sum_router_own_losses(records: Sequence[RoutingRecord]) -> Tensor:
    """Return the routers' own losses: mean over the tokens of all ranks, summed over layers."""
    penalties = [record.penalty for record in records if record.penalty is not None]
    return torch.stack([mean_over_ranks(penalty) for penalty in penalties]).sum()


def routing_loss(
    records: Sequence[RoutingRecord], regularizers: Sequence[Regularizer], progress: float = 0.0
) -> Tensor:
    """Return the weighted sum of regularizers, and of the routers' own losses, as a scalar.

    To add to the loss of another training loop. With gradient accumulation, call it in each forward
    pass: means over tokens (``z_loss``, ``entropy``) are averaged if passes are equally large, but
    balance losses (``importance``, ``load``, ``switch_balance``) demand balance in each pass.

    Args:
        records: of one forward pass, as ``trace`` collects them.
        regularizers: that need only the records.
        progress: share of the training that is done, for regularizers with a schedule.

    Raises:
        UserError: for a regularizer that needs more than the records, or the probability of being
            chosen where the router has none.
    """
    lacks_load = any(part.probs.requires_grad and not part.load.requires_grad for part in records)
    for regularizer in regularizers:
        if lacking := sorted(regularizer.needs - {"routing", "load"}):
            raise UserError.at(
                "regularizers",
                found=f"{regularizer.kind}, which needs {', '.join(lacking)}",
                allowed="regularizers that need only the records",
            )
        if "load" in regularizer.needs and lacks_load:
            raise UserError.at(
                "regularizers",
                found=f"{regularizer.kind}, but the router gives no chance of being chosen",
                allowed="importance",
            )
    blank = torch.zeros(())
    output = ModelOutput(blank, tuple(records))
    step = ObjectiveInputs(Batch(blank, blank, blank), output, None, progress=progress)
    weighted = (regularizer.weight * regularizer(step) for regularizer in regularizers)
    loss = sum(weighted, start=blank)
    if any(record.penalty is not None for record in records):
        loss = loss + sum_router_own_losses(records)
    return loss


def hard_distillation_loss(step: ObjectiveInputs) -> Tensor:
    """Return the cross-entropy of the student's last head with the teacher's predicted class."""
    if reason := step.model.image.task.needs_classes("distillation"):
        raise UserError(f"distillation: {reason}; allowed: distillation: 0")
    if step.guidance is None:
        raise UserError(
            "distillation: there is no teacher in this step; run the stages teacher and "
            "teacher_router first, or set distillation: 0"
        )
    student = step.output.heads[-1]
    teacher = step.guidance.prediction
    if student.shape != teacher.shape:
        raise UserError(
            f"distillation: the teacher knows {teacher.shape[-1]} classes, the student "
            f"{student.shape[-1]}; they must be the same, or distillation 0"
        )
    return cross_entropy(student.float(), teacher.argmax(dim=-1))


class TrainingJob(NamedTuple):
    model: BackboneModel
    train: loader.LoadedSplit | loader.TextStreams
    validation: loader.LoadedSplit
    objective: Objective
    guide: Guide | None = None  # a frozen teacher, for the losses that need one
    views: int = 1  # per image
    isolation: TissueIsolationSchedule | None = None  # which volumes are reduced to one tissue

    @property
    def task(self) -> Task:
        return self.model.image.task

    @property
    def complete_model(self) -> Model:
        """The model as used after training: alone, or with the teacher that its router needs."""
        return attach_required_guide(self.model, self.guide)

    def updates_per_epoch(self, settings: Training) -> int:
        """Return the number of updates per epoch: as set, or one pass over the training data."""
        if settings.updates is not None:
            return settings.updates
        if isinstance(self.train, loader.TextStreams):
            return self.train.steps_per_pass(settings.batch)
        return loader.steps_per_epoch(len(self.train.labels), settings.batch)

    @property
    def learners(self) -> nn.ModuleDict:
        """All modules that learn: the model, and the teacher's routers if they learn with it."""
        learners: dict[str, nn.Module] = {"model": self.model}
        if self.guide is not None and self.guide.learns:
            learners["teacher_routers"] = self.guide.routers
        return nn.ModuleDict(learners)

    @property
    def learned_teacher_routers(self) -> list[nn.Parameter]:
        """The weights of the teacher's routers if they learn with the model, else []."""
        if self.guide is not None and self.guide.learns:
            return list(self.guide.routers)
        return []


def build_training_job(
    model: BackboneModel,
    data: prepared.Prepared,
    objective: Objective,
    device: str,
    guide: Guide | None = None,
    subset: np.ndarray | None = None,
    views: int = 1,
    isolation: TissueIsolationSchedule | None = None,
    permuted: int | None = None,  # seed of a null control, whose training labels are permuted
) -> TrainingJob:
    split = data.train
    if subset is not None:
        split = prepared.Split(split.images[subset], split.labels[subset])
    if permuted is not None:
        generator = np.random.default_rng([permuted, PERMUTED_LABELS])
        split = prepared.Split(split.images, generator.permutation(split.labels))
    train: loader.LoadedSplit | loader.TextStreams
    if "tokens" in data.card:  # a text is read as streams; its windows are not shifted
        tokens = torch.from_numpy(np.array(data.tokens_with_kinds("train")))
        train = loader.TextStreams(tokens.to(device), *data.card["size"])
    else:
        train = loader.load_split_where_it_fits(split, device)
    validation = loader.load_split_where_it_fits(data.validation, device)
    guide = None if guide is None else guide.to(device)
    return TrainingJob(model, train, validation, objective, guide, views, isolation)


def training_batch(job: TrainingJob, settings: Training, seed: int, step: int) -> Batch:
    """Return the augmented batch of a step, a function of (seed, step) only."""
    rows = rank_and_size().rows(settings.batch)
    if isinstance(job.train, loader.TextStreams):
        tokens, following, anew = job.train.take(settings.batch, seed, step, rows)
        return Batch(tokens, following, torch.empty(0), anew=anew)
    views = draw_batch_and_views(job, settings, seed, step, rows)
    images, labels = views.images, views.labels
    # Two views of an image are never mixed: a patch would lose its counterpart (PRC, §IV).
    if settings.mix is not None and job.views == 1:

        def make_partners(places: Tensor) -> tuple[Tensor, Tensor]:
            partners = draw_batch_and_views(job, settings, seed, step, places)
            return partners.images, partners.labels

        # With one rank the batch contains all partners.
        others_of = None if views.draws.rows is None else make_partners
        images, labels = mix_batch(images, labels, job.task, settings.mix, views.draws, others_of)
    batch = Batch(images, labels, views.affines, job.views)
    if job.isolation is None or views.region is None:
        return batch
    return job.isolation.mark_experts(batch, views.region, views.epoch, job.model.layout)


class BatchViews(NamedTuple):
    """Views of some images of a step's batch; all first views come before all second views."""

    images: Tensor
    affines: Tensor
    labels: Tensor
    region: Tensor | None  # the tissue that each volume is reduced to
    epoch: int
    draws: BatchDraws  # its generator has drawn the views


def draw_batch_and_views(
    job: TrainingJob, settings: Training, seed: int, step: int, places: Tensor | None
) -> BatchViews:
    """Return the views of the batch's images at ``places``, indices in the batch; None: of all."""
    draws = BatchDraws(generator_for(seed, step, VIEWS), settings.batch, places)
    order = loader.batch_indices(len(job.train.labels), settings.batch, seed, step)
    indices = draws.select_rows(order)
    assert not isinstance(job.train, loader.TextStreams)
    images, labels = job.train.take(indices)
    labels = job.task.drawn(labels, draws)
    epoch = step // job.updates_per_epoch(settings)
    region = None
    if job.isolation is not None and isinstance(images, Tensor):
        images, region = job.isolation.isolate_volumes(images, indices, step, epoch, draws)
        region = region.repeat(job.views)
    drawn_views = [make_random_views(images, settings.views, draws) for _ in range(job.views)]
    views, affines = drawn_views[0]
    if job.views > 1:
        views = torch.cat([images for images, _ in drawn_views])
        affines = torch.cat([affines for _, affines in drawn_views])
    return BatchViews(views, affines, torch.cat([labels] * job.views), region, epoch, draws)


BATCH_LOCK = Lock()  # held while a thread makes a batch, and while a step is captured


# Errors of ``make`` are raised at the step that they belong to.
class BatchPrefetcher:
    """Calls ``make(step)`` in a thread for the next ``steps`` while the device computes."""

    def __init__(self, make: Callable[[int], Batch], steps: range, depth: int = 2) -> None:
        self.make = make
        self.steps = steps
        self.depth = depth  # steps made ahead
        self.waiting: dict[int, Future] = {}
        self.stream: torch.cuda.Stream | None = None
        if not torch.cuda.is_available():
            self.pool = ThreadPoolExecutor(1, "batches")
            return
        # A new thread starts with the first card selected.
        card = torch.cuda.current_device()
        self.pool = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (card,))
        self.stream = torch.cuda.Stream(card)
        # The data set may still be being copied to the device.
        self.stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, step: int) -> Batch:
        for later in range(step, min(step + self.depth + 1, self.steps.stop)):
            if later not in self.waiting:
                self.waiting[later] = self.pool.submit(self._make_on_stream, later)
        batch, done = self.waiting.pop(step).result()
        if done is not None:
            reader = torch.cuda.current_stream()
            reader.wait_event(done)
            for value in batch:
                if isinstance(value, Tensor) and value.is_cuda:
                    value.record_stream(reader)  # its memory is not reused before it was read
        return batch

    def _make_on_stream(self, step: int) -> tuple[Batch, torch.Event | None]:
        if self.stream is None:
            return self.make(step), None
        with BATCH_LOCK, torch.cuda.stream(self.stream):
            return self.make(step), self.stream.record_event()

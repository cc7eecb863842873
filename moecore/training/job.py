"""One training: a model, the images that it learns from, and the loss of a step, term by term.

B images of a step's whole batch; of several ranks each makes the pixels of its own images, and of
those that are mixed into them, but draws for all.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.core.ranks import current_ranks, has_process_group, mean_over_ranks
from moecore.core.routing_records import Batch, ModelOutput, ObjectiveInputs, RoutingRecord
from moecore.core.streams import ATTACK, PERMUTED, VIEWS, BatchDraws, generator_for
from moecore.data.loader import (
    Loaded,
    TextStreams,
    batch_indices,
    load_split_where_it_fits,
    steps_per_epoch,
)
from moecore.data.prepared import Prepared, Split
from moecore.data.views.views import make_random_views, mix_images
from moecore.nn.backbones.base_model import BackboneModel
from moecore.tasks.base import Task
from moecore.training.guide import Guide, attach_required_guide
from moecore.training.regularizers.base import Regularizer
from moecore.training.settings import Training
from moecore.training.single_tissue_volumes import TissueIsolationSchedule

RECORDED = frozenset({"routing", "load"})  # of a regularizer's needs, what records hold


class Objective(NamedTuple):
    """The task's loss plus weighted regularizers.

    distillation: share of DeiT's hard distillation (Touvron et al. 2021, eq. 3): the distillation
    head (or the only one) learns the teacher's most probable class.
    """

    regularizers: Sequence[Regularizer] = ()
    label_smoothing: float = 0.0
    distillation: float = 0.0
    text: Sequence[Regularizer] = ()  # of the routing of captions

    def terms(self, step: ObjectiveInputs) -> dict[str, Tensor]:
        """Unweighted scalars, fp32: ``task``, ``distillation`` if it is on, one a regularizer, and
        ``penalty``, what routers add by themselves: the mean over tokens, summed over layers.
        """
        output, labels = step.output, step.batch.labels
        if self.distillation:
            output = output._replace(prediction=output.heads[0])
        if (learned := step.batch.learned) is not None:
            heads = tuple(head[learned] for head in output.heads)
            output = output._replace(prediction=output.prediction[learned], heads=heads)
            labels = labels[learned]
        loss_of = step.model.task_loss
        if step.batch.learned is not None and has_process_group():
            # Ranks have unequally many images that teach the task.
            losses = loss_of(output, labels, self.label_smoothing, reduction="none")
            terms = {"task": mean_over_ranks(losses)}
        else:
            terms = {"task": loss_of(output, labels, self.label_smoothing)}
        if self.distillation:
            terms["distillation"] = hard_distillation(step)
        terms |= {regularizer.kind: regularizer(step) for regularizer in self.regularizers}
        if self.text:
            spoken = step._replace(output=step.output._replace(routing=step.output.text_routing))
            terms |= {f"text_{regularizer.kind}": regularizer(spoken) for regularizer in self.text}
        records = (*output.routing, *output.text_routing)
        if any(record.penalty is not None for record in records):
            terms["penalty"] = sum_router_penalties(records)
        return terms

    def score(self, step: ObjectiveInputs, terms: dict[str, Tensor]) -> Tensor:
        """The sum of the scores of the batch's images, on its device and unchecked."""
        task, batch = step.model.image.task, step.batch
        if task.long and not self.label_smoothing:  # its loss: not a second pass over 100 MB
            return terms["task"].detach() * len(batch.labels)
        return task.running(step.output.prediction.detach(), batch.labels, batch.learned)

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """The weighted sum that is minimised."""
        task = terms["task"]
        if self.distillation:
            task = (1 - self.distillation) * task + self.distillation * terms["distillation"]
        if "penalty" in terms:
            task = task + terms["penalty"]
        task = task + sum(
            regularizer.weight * terms[f"text_{regularizer.kind}"] for regularizer in self.text
        )
        return task + sum(
            regularizer.weight * terms[regularizer.kind] for regularizer in self.regularizers
        )


def sum_router_penalties(records: Sequence[RoutingRecord]) -> Tensor:
    """Return what routers add by themselves: the mean over the tokens of all ranks, summed over the
    layers that add something; one of them at least.
    """
    penalties = [record.penalty for record in records if record.penalty is not None]
    return torch.stack([mean_over_ranks(penalty) for penalty in penalties]).sum()


def routing_loss(
    records: Sequence[RoutingRecord], regularizers: Sequence[Regularizer], progress: float = 0.0
) -> Tensor:
    """The weighted sum of regularizers of routing alone, and what routers add by themselves (the
    records' ``penalty``): a scalar to add to one's own loss.

    records: of one forward pass, as ``trace`` collects them.  progress: share of the training that
    is done, for regularizers that look at it.  Raises UserError for one that needs more than the
    records, or the chance of being chosen where the router gives none.
    """
    for regularizer in regularizers:
        check_records_suffice(regularizer, records)
    blank = torch.zeros(())
    output = ModelOutput(blank, tuple(records))
    step = ObjectiveInputs(Batch(blank, blank, blank), output, None, progress=progress)
    loss = sum((one.weight * one(step) for one in regularizers), start=blank)
    if any(record.penalty is not None for record in records):
        loss = loss + sum_router_penalties(records)
    return loss


def check_records_suffice(regularizer: Regularizer, records: Sequence[RoutingRecord]) -> None:
    """Raise UserError where a regularizer needs what these records do not hold."""
    if lacking := sorted(regularizer.needs - RECORDED):
        problem = f"found {regularizer.kind}, which needs {', '.join(lacking)}"
        raise UserError(f"regularizers: {problem}; allowed: what needs the records alone")
    hard = any(one.probs.requires_grad and not one.load.requires_grad for one in records)
    if "load" in regularizer.needs and hard:
        problem = f"found {regularizer.kind}, but the router gives no chance of being chosen"
        raise UserError(f"regularizers: {problem}; allowed: importance")


def hard_distillation(step: ObjectiveInputs) -> Tensor:
    """Cross-entropy of the last head with the teacher's decisions; no label smoothing.

    Raises UserError without a fitting teacher, and for labels that are not one class each.
    """
    if why := step.model.image.task.needs_classes("distillation"):
        raise UserError(f"distillation: {why}; allowed: distillation: 0")
    if step.guidance is None:
        mend = "run the stages teacher and teacher_router first, or set distillation: 0"
        raise UserError(f"distillation: there is no teacher in this step; {mend}")
    student = step.output.heads[-1]
    teacher = step.guidance.prediction
    if student.shape != teacher.shape:
        problem = f"the teacher knows {teacher.shape[-1]} classes, the student {student.shape[-1]}"
        raise UserError(f"distillation: {problem}; they must be the same, or distillation 0")
    return cross_entropy(student.float(), teacher.argmax(dim=-1))


class TrainingJob(NamedTuple):
    """A model and what it learns from."""

    model: BackboneModel
    train: Loaded | TextStreams
    validation: Loaded
    objective: Objective
    guide: Guide | None = None  # a frozen teacher, for the losses that need one
    views: int = 1  # of each image
    isolation: TissueIsolationSchedule | None = None  # which volumes keep one tissue

    @property
    def task(self) -> Task:
        """Return what the model predicts."""
        return self.model.image.task

    def updates(self, settings: Training) -> int:
        """Return the updates of an epoch: as set, or once over all that there is."""
        if settings.updates is not None:
            return settings.updates
        if isinstance(self.train, TextStreams):
            return self.train.steps(settings.batch)
        return steps_per_epoch(len(self.train.labels), settings.batch)

    @property
    def learners(self) -> nn.ModuleDict:
        """All that learns: the model, and the teacher's routers where they learn with it."""
        learners: dict[str, nn.Module] = {"model": self.model}
        if self.guide is not None and self.guide.learns:
            learners["teacher_routers"] = self.guide.routers
        return nn.ModuleDict(learners)

    @property
    def routers(self) -> list[nn.Parameter]:
        """Return the teacher's routers where they learn with the model."""
        if self.guide is None or not self.guide.learns:
            return []
        return list(self.guide.routers)


def build_training_job(
    model: BackboneModel,
    data: Prepared,
    objective: Objective,
    device: str,
    guide: Guide | None = None,
    subset: np.ndarray | None = None,
    views: int = 1,
    isolation: TissueIsolationSchedule | None = None,
    permuted: int | None = None,
) -> TrainingJob:
    """The training of ``model`` on prepared data, on ``device``; of the training images ``subset``
    alone. permuted: the seed of a null control, whose training labels change places.
    """
    train = data.train
    if subset is not None:
        train = Split(train.images[subset], train.labels[subset])
    if permuted is not None:
        places = np.random.default_rng([permuted, PERMUTED])
        train = Split(train.images, places.permutation(train.labels))
    if guide is not None:
        guide = guide.to(device)
    learned: Loaded | TextStreams
    if "tokens" in data.card:  # a text is read as a stream; its windows are not moved
        tokens = torch.from_numpy(np.array(data.text_rows("train")))
        learned = TextStreams(tokens.to(device), *data.card["size"])
    else:
        learned = load_split_where_it_fits(train, device)
    validation = load_split_where_it_fits(data.validation, device)
    return TrainingJob(model, learned, validation, objective, guide, views, isolation)


def training_batch(job: TrainingJob, settings: Training, seed: int, step: int) -> Batch:
    """The augmented batch of a step: a function of (seed, step) alone.

    With mixing the labels are (B, K) shares, else as the data set has them. Two views of each image
    are never mixed with other images: a patch would lose its partner (PRC, §IV).
    """
    rows = current_ranks().rows(settings.batch)
    if isinstance(job.train, TextStreams):
        words, following, anew = job.train.take(settings.batch, seed, step, rows)
        return Batch(words, following, torch.empty(0), anew=anew)
    made = make_batch_views(job, settings, seed, step, rows)
    views, labels = made.images, made.labels
    if settings.mix is not None and job.views == 1:

        def others(places: Tensor) -> tuple[Tensor, Tensor]:
            partners = make_batch_views(job, settings, seed, step, places)
            return partners.images, partners.labels

        # Of a whole batch the partners are there already.
        look = None if made.draws.rows is None else others
        views, labels = mix_images(views, labels, job.task, settings.mix, made.draws, look)
    batch = Batch(views, labels, made.affines, job.views)
    if job.isolation is None or made.region is None:
        return batch
    return job.isolation.marked(batch, made.region, made.epoch, job.model.layout)


class BatchViews(NamedTuple):
    """Views of some images of a step's batch; the first views of all come before the second."""

    images: Tensor
    affines: Tensor
    labels: Tensor
    region: Tensor | None  # which tissue each keeps
    epoch: int
    draws: BatchDraws  # whose generator has drawn the views


def make_batch_views(
    job: TrainingJob, settings: Training, seed: int, step: int, places: Tensor | None
) -> BatchViews:
    """The views of the images at ``places`` of the batch; None for all of them."""
    draws = BatchDraws(generator_for(seed, step, VIEWS), settings.batch, places)
    indices = draws.select_rows(batch_indices(len(job.train.labels), settings.batch, seed, step))
    assert not isinstance(job.train, TextStreams)
    images, labels = job.train.take(indices)
    labels = job.task.drawn(labels, draws)
    epoch = step // job.updates(settings)
    region = None
    if job.isolation is not None and isinstance(images, Tensor):
        images, region = job.isolation.isolated(images, indices, step, epoch, draws)
        region = region.repeat(job.views)
    made = [make_random_views(images, settings.views, draws) for _ in range(job.views)]
    views, affines = made[0]
    if job.views > 1:
        views = torch.cat([images for images, _ in made])
        affines = torch.cat([affines for _, affines in made])
    return BatchViews(views, affines, torch.cat([labels] * job.views), region, epoch, draws)


def apply_adversarial(
    job: TrainingJob, settings: Training, seed: int, step: int, batch: Batch
) -> Batch:
    """Return the batch that a step learns from: attacked where training is adversarial."""
    if settings.adversarial is None:
        return batch
    model = attach_required_guide(job.model, job.guide)
    return settings.adversarial.attacked(model, job.task, batch, generator_for(seed, step, ATTACK))


class BatchPrefetcher:
    """``make(step)`` for ``steps`` in their order, made by a thread while the device computes.

    Beside a GPU it copies and draws on a stream of its own. What a step draws is a function of its
    number, so it may be drawn early. Errors of ``make`` are raised where the step's turn is.
    """

    def __init__(self, make: Callable[[int], Batch], steps: range, depth: int = 2) -> None:
        """depth: steps that are made before their turn."""
        card = torch.cuda.current_device() if torch.cuda.is_available() else None
        chosen = (torch.cuda.set_device, (card,)) if card is not None else (None, ())
        self.pool = ThreadPoolExecutor(1, "batches", *chosen)  # a thread begins with the first card
        self.make = make
        self.steps = steps
        self.depth = depth
        self.waiting: dict[int, Future] = {}
        self.stream: torch.cuda.Stream | None = None
        if card is not None:
            self.stream = torch.cuda.Stream(card)
            self.stream.wait_stream(torch.cuda.current_stream())  # the data on the device are whole

    def __call__(self, step: int) -> Batch:
        for later in range(step, min(step + self.depth + 1, self.steps.stop)):
            if later not in self.waiting:
                self.waiting[later] = self.pool.submit(self._made, later)
        batch, done = self.waiting.pop(step).result()
        if done is not None:
            reader = torch.cuda.current_stream()
            reader.wait_event(done)
            for value in batch:
                if isinstance(value, Tensor) and value.is_cuda:
                    value.record_stream(reader)  # not to be overwritten before it was read
        return batch

    def _made(self, step: int) -> tuple[Batch, torch.Event | None]:
        if self.stream is None:
            return self.make(step), None
        with torch.cuda.stream(self.stream):
            return self.make(step), self.stream.record_event()

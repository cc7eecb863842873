"""The loss of one training step, term by term."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.core.ranks import has_process_group, mean_over_ranks
from moecore.core.routing_records import Batch, ModelOutput, ObjectiveInputs, RoutingRecord
from moecore.training.regularizers.base import Regularizer

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

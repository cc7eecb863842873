"""The loss of one training step, term by term."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.files import StageError
from moecore.records import Step
from moecore.regularizers import Regularizer


class Objective(NamedTuple):
    """Cross-entropy plus weighted regularizers; called with a Step it gives the raw terms by name.

    distillation: share of DeiT's hard distillation (Touvron et al. 2021, eq. 3): the class head learns the labels, the
    distillation head (the same head where there is one only) the teacher's most probable class.
    """

    regularizers: Sequence[Regularizer] = ()
    label_smoothing: float = 0.0
    distillation: float = 0.0

    def terms(self, step: Step) -> dict[str, Tensor]:
        """Unweighted scalars, fp32: ``task``, ``distillation`` where it is on, one per regularizer. Labels are (B,) classes or (B, K) shares."""
        logits = step.output.heads[0] if self.distillation else step.output.prediction
        terms = {"task": cross_entropy(logits.float(), step.batch.labels, label_smoothing=self.label_smoothing)}
        if self.distillation:
            terms["distillation"] = hard_distillation(step)
        return terms | {regularizer.kind: regularizer(step) for regularizer in self.regularizers}

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """The weighted sum that is minimised."""
        task = terms["task"]
        if self.distillation:
            task = (1 - self.distillation) * task + self.distillation * terms["distillation"]
        return task + sum(regularizer.weight * terms[regularizer.kind] for regularizer in self.regularizers)


def hard_distillation(step: Step) -> Tensor:
    """Cross-entropy of the last head with the teacher's decisions; no label smoothing. Raises StageError without a fitting teacher."""
    if step.guidance is None:
        raise StageError("distillation: there is no teacher in this step; run the stages teacher and teacher_router first, or set distillation: 0")
    student, teacher = step.output.heads[-1], step.guidance.prediction
    if student.shape != teacher.shape:
        raise StageError(f"distillation: the teacher knows {teacher.shape[-1]} classes, the student {student.shape[-1]}; they must be the same, or distillation 0")
    return cross_entropy(student.float(), teacher.argmax(dim=-1))

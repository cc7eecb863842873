"""The loss of one training step, term by term."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss

from moecore.evaluation.multi_label import multi_hot
from moecore.files import StageError
from moecore.records import Step, real
from moecore.regularizers import Regularizer


class Objective(NamedTuple):
    """The task's loss plus weighted regularizers; called with a Step it gives the raw terms by name.

    distillation: share of DeiT's hard distillation (Touvron et al. 2021, eq. 3): the class head learns the labels, the
    distillation head (the same head where there is one only) the teacher's most probable class.
    """

    regularizers: Sequence[Regularizer] = ()
    label_smoothing: float = 0.0
    distillation: float = 0.0

    def terms(self, step: Step) -> dict[str, Tensor]:
        """Unweighted scalars, fp32: ``task``, ``distillation`` where it is on, one per regularizer."""
        logits = step.output.heads[0] if self.distillation else step.output.prediction
        unit, labels = step.model.image.target_std if real(step.batch.labels) else 1.0, step.batch.labels
        if step.batch.learned is not None:
            logits, labels = logits[step.batch.learned], labels[step.batch.learned]
        terms = {"task": task_loss(logits, labels, self.label_smoothing, unit)}
        if self.distillation:
            terms["distillation"] = hard_distillation(step)
        return terms | {regularizer.kind: regularizer(step) for regularizer in self.regularizers}

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """The weighted sum that is minimised."""
        task = terms["task"]
        if self.distillation:
            task = (1 - self.distillation) * task + self.distillation * terms["distillation"]
        return task + sum(regularizer.weight * terms[regularizer.kind] for regularizer in self.regularizers)


def task_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, unit: float = 1.0) -> Tensor:
    """What the labels say of logits (B, K), a mean over images, fp32.

    For real labels fp32 (B,) and predictions (B, 1) the mean absolute error, divided by ``unit``, the training labels' deviation: about 0.8
    at the start whatever is predicted in years or days, so that learning rates and the weights of other losses keep their meaning
    (L1: ERMoE, algorithm 2, line 13; the division is our choice).

    Softmax cross-entropy for classes int64 (B,) and for shares of mixed images fp32 (B, K). For sets of classes uint8 (B, K) sigmoid
    cross-entropy, *summed* over the classes, as V-MoE's authors train on JFT (big_vision, ``sigmoid_xent``): a class then has the weight
    that it has in the softmax, however many classes there are. AdamW's steps do not depend on the scale of the loss, so learning
    rates stay what they were; beside balance losses the task counts more (K ln 2 against ln K at the start).
    Raises StageError for label smoothing of sets of classes or of real labels, and for predictions of real labels that are not (B, 1).
    """
    if real(labels):
        if label_smoothing:
            raise StageError(f"label_smoothing: found {label_smoothing}, but these labels are real numbers; allowed: 0")
        if logits.shape != (len(labels), 1):
            raise StageError(f"the model predicts {tuple(logits.shape)} for {len(labels)} real labels; needed: one number an image, a model built for a target")
        return l1_loss(logits[:, 0].float(), labels.float()) / unit
    if not multi_hot(labels):
        return cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)
    if label_smoothing:
        raise StageError(f"label_smoothing: found {label_smoothing}, but these images have several labels each; allowed: 0")
    return binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="sum") / len(labels)


def hard_distillation(step: Step) -> Tensor:
    """Cross-entropy of the last head with the teacher's decisions; no label smoothing.

    Raises StageError without a fitting teacher, for real labels, and for images with several labels: the teacher's most probable class is not all of them.
    """
    if real(step.batch.labels):
        raise StageError("distillation: these labels are real numbers, and a hard decision is a class; allowed: distillation: 0")
    if multi_hot(step.batch.labels):
        raise StageError("distillation: these images have several labels each, and a hard decision is one class; allowed: distillation: 0")
    if step.guidance is None:
        raise StageError("distillation: there is no teacher in this step; run the stages teacher and teacher_router first, or set distillation: 0")
    student, teacher = step.output.heads[-1], step.guidance.prediction
    if student.shape != teacher.shape:
        raise StageError(f"distillation: the teacher knows {teacher.shape[-1]} classes, the student {student.shape[-1]}; they must be the same, or distillation 0")
    return cross_entropy(student.float(), teacher.argmax(dim=-1))

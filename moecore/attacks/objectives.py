"""What an attack maximises: one value per image, so that a step size can be chosen per image and the sum couples no two of them.

B images, T tokens per image, E experts, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from moecore.files import StageError
from moecore.records import ModelOutput, RoutingRecord, real
from moecore.spread import squared_cv

Objective = Literal["task", "cross_entropy", "dlr", "balance", "routing_change"]
Score = Callable[[ModelOutput], Tensor]  # what a model said of B images → (B,)


def score(objective: Objective, weight: float, model: nn.Module, images: Tensor, labels: Tensor) -> Score:
    """The objective for these images (B, C, H, W) and labels; ``weight`` is that of the balance losses.

    labels: as ``task`` takes them.  The clean routing that ``routing_change`` compares with is computed
    here, once.  Raises StageError where an objective cannot be computed for such labels or so few classes.
    """
    if objective == "routing_change":
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            before = [record.chosen for record in model(images).routing]
        return lambda output: routing_change(output, before)
    if objective == "balance":
        return lambda output: task(output.prediction, labels) + weight * balance(output.routing)
    if objective == "task":
        return lambda output: task(output.prediction, labels)
    if real(labels):
        raise StageError(f"attack: objective {objective} needs classes, and these labels are real numbers; choose task, which is the absolute error")
    if objective == "dlr":
        return lambda output: dlr(output.prediction, labels)
    return lambda output: cross_entropy(output.prediction, labels)


def task(prediction: Tensor, labels: Tensor) -> Tensor:
    """What a model is trained to make small, (B,): the absolute error for real labels, otherwise the cross-entropy."""
    return absolute_error(prediction, labels) if real(labels) else cross_entropy(prediction, labels)


def absolute_error(prediction: Tensor, labels: Tensor) -> Tensor:
    """|ŷ − y| of each image, (B,), in the target's unit, of predictions (B, 1) and real labels (B,).

    Raises ValueError for predictions of another shape, which would be broadcast to every pair of images.
    """
    if prediction.shape != (len(labels), 1):
        raise ValueError(f"attack: predictions are {tuple(prediction.shape)}; one number an image, ({len(labels)}, 1), is needed for real labels")
    return (prediction[:, 0] - labels.to(prediction.dtype)).abs()


def cross_entropy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each image, in nats, (B,), from logits (B, K).

    labels: (B,) classes, or (B, K) floating shares of mixed images, → softmax; (B, K) whole numbers 0 or 1, the sets of classes of
    multi-label images, → sigmoid, *summed* over classes (not their mean, which would shrink the loss with K).
    Raises ValueError for labels of another form.
    """
    if labels.ndim == 1 and not labels.is_floating_point():
        return functional.cross_entropy(prediction, labels.long(), reduction="none")
    if labels.shape != prediction.shape:
        raise ValueError(f"attack: labels are {labels.dtype} {tuple(labels.shape)}; classes (B,) or one number per class (B, K) are needed")
    if labels.is_floating_point():
        return functional.cross_entropy(prediction, labels.to(prediction.dtype), reduction="none")
    return functional.binary_cross_entropy_with_logits(prediction, labels.to(prediction.dtype), reduction="none").sum(dim=1)


def dlr(prediction: Tensor, labels: Tensor) -> Tensor:
    """Difference of logits ratio −(z_y − max_{i≠y} z_i) / (z_π1 − z_π3), (B,) (Croce & Hein 2020, eq. 6).

    Positive where the image is misclassified; shifting or scaling the logits (B, K) changes nothing.  Raises StageError for
    fewer than 3 classes, where the third largest logit z_π3 does not exist, and for multi-label images.
    """
    if prediction.shape[1] < 3:
        raise StageError(f"attack: the dlr objective needs at least 3 classes, and the model has {prediction.shape[1]}; choose cross_entropy")
    if labels.ndim != 1:
        raise StageError("attack: the dlr objective needs one label per image, and these have several; choose cross_entropy")
    ordered, classes = prediction.sort(dim=1)
    right = prediction.gather(1, labels[:, None].long())[:, 0]
    other = torch.where(classes[:, -1] == labels, ordered[:, -2], ordered[:, -1])
    return -(right - other) / (ordered[:, -1] - ordered[:, -3] + 1e-12)


def balance(routing: Sequence[RoutingRecord]) -> Tensor | float:
    """Sum over MoE layers of the importance and the load loss of these images together; a scalar, 0 for a dense model (eq. 12 and 16).

    Added to each of B images' cross-entropy and summed, it counts B times: the gradient is then B times that of *mean*
    cross-entropy + weight · losses, which is what the paper maximises.
    """
    return sum(squared_cv(record.probs.sum(dim=(0, 1))) + squared_cv(record.load.sum(dim=(0, 1))) for record in routing)


def routing_change(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """How far probability has left the experts chosen ``before``, (B,); stands in for 1 − IoU, which has no gradient.

    before: (B, T, E) bool per MoE layer.  Sum over layers of the mean over tokens of −Σ_e (chosen_e / number chosen)·log p_e;
    a token that chose none adds 0.
    """
    values = 0.0 * output.prediction.float().sum(dim=1)  # a hash router has no gradient: this makes it 0 instead of undefined
    for record, chosen in zip(output.routing, before, strict=True):
        share = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=1)
        log = record.probs.clamp_min(torch.finfo(record.probs.dtype).tiny).log()
        values = values - (share * log).sum(dim=-1).mean(dim=1)
    return values

"""What an attack maximises.

One value an image, so that a step size can be chosen per image and the sum couples no two of them.

B images, T tokens per image, E experts, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.statistics.intervals import squared_cv
from moecore.tasks.base import Task

Objective = Literal["task", "cross_entropy", "dlr", "balance", "routing_change"]
Goal = Callable[[ModelOutput], Tensor]  # what a model said of B images → (B,)


DLR_CLASSES = 3  # at least, for the third largest logit


def objective_refusal(objective: Objective, task: Task) -> str | None:
    """Return why an objective cannot be computed for such labels, in words; None where it can."""
    if objective == "cross_entropy" and (reason := task.needs_classes("classes")):
        return f"objective cross_entropy needs classes, and {reason}"
    if objective == "dlr" and (reason := task.needs_classes("classes")):
        return f"objective dlr needs classes, and {reason}"
    if objective == "dlr" and (reason := task.needs_classes("one_class")):
        return f"objective dlr needs one label per image, and {reason}"
    return None


def make_objective(
    objective: Objective,
    weight: float,
    model: nn.Module,
    task: Task,
    images: Tensor,
    labels: Tensor,
) -> Goal:
    """The objective for these images (B, C, H, W) and their labels.

    weight: of the balance losses. The clean routing that ``routing_change_surrogate`` compares with
    is computed here, once. Raises UserError where an objective cannot be computed for such labels.
    """
    if reason := objective_refusal(objective, task):
        raise UserError(f"attack: {reason}; choose objective task")
    if objective == "routing_change":
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            before = [record.chosen for record in model(images).routing]
        return lambda output: routing_change_surrogate(output, before)
    if objective == "dlr":
        return lambda output: dlr_loss(output.prediction, labels)
    if objective == "balance":
        return lambda output: (
            task.attack_loss(output.prediction, labels)
            + weight * total_balance_loss(output.routing)
        )
    return lambda output: task.attack_loss(output.prediction, labels)


def dlr_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    """Difference of logits ratio −(z_y − max_{i≠y} z_i) / (z_π1 − z_π3), (B,).

    Positive where the image is misclassified; shifting or scaling the logits (B, K) changes
    nothing. labels: (B,) classes. Raises UserError for fewer than 3 classes, where the third
    largest logit z_π3 does not exist. Source: Croce & Hein (2020), eq. 6.
    """
    if prediction.shape[1] < DLR_CLASSES:
        raise UserError(
            f"attack: the dlr objective needs at least {DLR_CLASSES} classes, and the model has "
            f"{prediction.shape[1]}; choose cross_entropy"
        )
    ordered, classes = prediction.sort(dim=1)
    right = prediction.gather(1, labels[:, None].long())[:, 0]
    other = torch.where(classes[:, -1] == labels, ordered[:, -2], ordered[:, -1])
    return -(right - other) / (ordered[:, -1] - ordered[:, -3] + 1e-12)


def total_balance_loss(routing: Sequence[RoutingRecord]) -> Tensor | float:
    """Sum over MoE layers of the importance and the load loss of these images together; a scalar.

    0 for a dense model. Added to each of B images' task loss and summed, it counts B times: the
    gradient is then B times that of *mean* task loss + weight · losses, which is what the paper
    maximises. Source: adversarial-moe, eq. 12 and 16.
    """
    return sum(
        squared_cv(record.probs.sum(dim=(0, 1))) + squared_cv(record.load.sum(dim=(0, 1)))
        for record in routing
    )


def routing_change_surrogate(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """Return how far probability has left the experts chosen ``before``, (B,).

    Stands in for 1 − IoU, which has no gradient. before: (B, T, E) bool per MoE layer. Summed over
    layers, mean over tokens of −Σ_e (chosen_e / number chosen)·log p_e (none chosen: 0).
    """
    # A hash router has no gradient: the zero share of the prediction makes it 0 and not undefined.
    values = 0.0 * output.prediction.float().sum(dim=1)
    for record, chosen in zip(output.routing, before, strict=True):
        share = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=1)
        log = record.probs.clamp_min(torch.finfo(record.probs.dtype).tiny).log()
        values = values - (share * log).sum(dim=-1).mean(dim=1)
    return values

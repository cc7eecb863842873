"""Base of the gradient attacks: objectives, their gradients, and the L∞ ball.

An objective is one value per image, so step sizes can differ per image and their sum couples no
images. Pixels lie in [0, 1]; epsilon is in the same units (8/255, not 8). Volumes work too.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.attacks.base import Attack, Generators, ImageGenerators, expand_generators
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.statistics.intervals import squared_cv
from moecore.tasks.base import Task

# Images (B, C, H, W) → the objective of each (B,), and the gradient of their sum.
ObjectiveGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

Objective = Literal["task", "cross_entropy", "dlr", "balance", "routing_change"]
Goal = Callable[[ModelOutput], Tensor]  # a model's output for B images → the objective (B,)
MIN_DLR_CLASSES = 3  # for the third largest logit


class Ball(NamedTuple):
    """The allowed images: in [0, 1], within ``epsilon`` of the clean images (L∞)."""

    centre: Tensor  # (B, C, H, W), the clean images
    epsilon: float

    def project(self, images: Tensor) -> Tensor:
        """Return the nearest images inside the ball, (B, C, H, W)."""
        return images.clamp(self.centre - self.epsilon, self.centre + self.epsilon).clamp(0, 1)


class GradientAttack(Attack):
    """An attack along the gradient of an objective; subclasses define ``perturb_images``."""

    objective: Objective = Field(
        "task", description="task: its loss is maximised; balance: the routers' balance losses too"
    )
    weight: float = Field(
        0.005, ge=0, description="Of the balance losses, against the mean task loss (`balance`)."
    )
    group: int = Field(
        100, ge=1, description="Images attacked together by `balance`, whose losses couple them."
    )
    inside: bool = Field(
        False, description="Change only pixels that are not 0: a brain's background stays 0."
    )

    @property
    def together(self) -> int | None:
        return self.group if self.objective == "balance" else None

    @property
    def climbs_task(self) -> bool:
        return self.objective in ("task", "cross_entropy")

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, reason) if the data's labels or classes do not allow the objective."""
        allowed = "allowed: task (the loss that is learned), balance, routing_change"
        reason = None if around.source is None else objective_refusal(self.objective, around.task)
        classes = len(getattr(around.preview, "classes", None) or ())
        if reason:
            yield ("objective",), f"found {self.objective}: {reason} ({around.data}); {allowed}"
        elif self.objective == "dlr" and 0 < classes < MIN_DLR_CLASSES:
            text = f"found dlr, but {around.data} has {classes} classes, not {MIN_DLR_CLASSES}"
            yield ("objective",), f"{text} or more; {allowed}, cross_entropy"

    def refuses(self, task: Task | type[Task]) -> str | None:
        reason = objective_refusal(self.objective, task)
        return f"{self.kind} with {reason}" if reason else None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        if self.objective == "routing_change" and getattr(model, "moe", None) is None:
            return "the model has no MoE layer whose routing could change"
        return self.refuses(task)

    def __call__(
        self,
        model: nn.Module,
        task: Task,
        images: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: Generators = None,
    ) -> Tensor:
        if not images.is_floating_point():
            raise ValueError(
                f"attack: images are {images.dtype}; floating point in [0, 1] is needed"
            )
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            limits = f"[{images.min():.4g}, {images.max():.4g}]"
            raise ValueError(f"attack: images are in {limits}; [0, 1] is needed")
        if not epsilon >= 0:  # also NaN
            raise ValueError(f"attack: epsilon is {epsilon}; 0 or more is needed")
        centre = images.detach().to(torch.float32, copy=True)
        if epsilon == 0 or not len(centre):
            return centre
        size = self.together or len(centre)
        generators = expand_generators(generator, len(centre))
        attacked = []
        with frozen_parameters(model):
            for start in range(0, len(centre), size):
                rows = slice(start, start + size)
                goal = make_objective(
                    self.objective, self.weight, model, task, centre[rows], labels[rows]
                )
                starts = None if generators is None else generators[rows]
                at = ModelGradient(model, goal)
                attacked.append(self._perturb_inside(at, Ball(centre[rows], epsilon), starts))
                at.check_finite()
        return torch.cat(attacked)

    def _perturb_inside(
        self, at: "ModelGradient", ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        """Return attacked images with an unchanged truth channel and, if ``inside``, background."""
        if not self.inside and not at.says_truth:
            return self.perturb_images(at, ball, generator)
        may_change = torch.ones_like(ball.centre, dtype=torch.bool)
        if self.inside:
            may_change &= (ball.centre != 0).any(dim=1, keepdim=True)
        if at.says_truth:
            may_change[:, -1] = False

        def within(images: Tensor) -> tuple[Tensor, Tensor]:
            values, gradient = at(torch.where(may_change, images, ball.centre))
            return values, gradient * may_change

        return torch.where(may_change, self.perturb_images(within, ball, generator), ball.centre)

    @abstractmethod
    def perturb_images(
        self, at: ObjectiveGradient, ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        """Return the attacked images (B, C, H, W) of ``ball``, whose ε is above 0."""
        # at: objective (B,) and gradient (B, C, H, W) at images. generator: draws the random start.


# Of the sum, so that an image's gradient does not depend on its batch. In fp32 (but see
# ``BFloat16Model``). Parameters, their ``grad`` and the model's mode do not change.
class ModelGradient:
    """``gradient(images)``: the objectives (B,), and the gradient (B, C, H, W) of their sum."""

    def __init__(self, model: nn.Module, goal: Goal) -> None:
        self.model = model
        self.goal = goal
        # Per call, whether the gradient is finite, and the summed objective. Read once, at the end:
        # every check waits for the device.
        self._checks: list[tuple[Tensor, Tensor]] = []

    @property
    def says_truth(self) -> bool:
        """True if the last channel of the images holds the true kinds of patches, no pixels."""
        return bool(getattr(getattr(self.model, "image", None), "truth", 0))

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            leaf = images.detach().float().requires_grad_(True)
            output = self.model(leaf)
            values = self.goal(output._replace(prediction=output.prediction.float()))
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        values = values.detach()
        self._checks.append((torch.isfinite(gradient).all(), values.sum()))
        return values, gradient

    def check_finite(self) -> None:
        """Raise UserError if a gradient was not finite."""
        if not self._checks:
            return
        is_finite, losses = map(torch.stack, zip(*self._checks, strict=True))
        if not is_finite.all():
            raise UserError(
                f"attack: the loss ({float(losses[~is_finite][0]):.4g}) has a gradient that is not "
                "finite; look for NaN or infinity in the model's weights"
            )


def image_gradient(model: nn.Module, task: Task, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient (B, C, H, W) of the summed task loss, in fp32; see ``ModelGradient``."""
    with frozen_parameters(model):
        at = ModelGradient(model, lambda output: task.attack_loss(output.prediction, labels))
        _, gradient = at(images)
        at.check_finite()
    return gradient


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Turn off the gradients of all parameters inside, which saves a third of the experts' work."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def objective_refusal(objective: Objective, task: Task | type[Task]) -> str | None:
    """Return why an objective cannot be computed for a task's labels, in words; None if it can."""
    if objective in ("cross_entropy", "dlr") and (reason := task.needs_classes("classes")):
        return f"objective {objective} needs classes, and {reason}"
    if objective == "dlr" and (reason := task.needs_classes("one_class")):
        return f"objective dlr needs one label per image, and {reason}"
    return None


def make_objective(
    objective: Objective,
    weight: float,  # of the balance losses
    model: nn.Module,
    task: Task,
    images: Tensor,
    labels: Tensor,
) -> Goal:
    """Return a function from the model's output for ``images`` to the objective of each, (B,)."""
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
    """Return the difference of logits ratio −(z_y − max_{i≠y} z_i) / (z_π1 − z_π3), (B,)."""
    # Positive where the image is misclassified; invariant to shift and scale of the logits (B, K).
    # Fewer than 3 classes have no third largest logit z_π3. Source: Croce & Hein (2020), eq. 6.
    if prediction.shape[1] < MIN_DLR_CLASSES:
        raise UserError(
            f"attack: the dlr objective needs at least {MIN_DLR_CLASSES} classes, and the model "
            f"has {prediction.shape[1]}; choose cross_entropy"
        )
    ordered, classes = prediction.sort(dim=1)
    right = prediction.gather(1, labels[:, None].long())[:, 0]
    other = torch.where(classes[:, -1] == labels, ordered[:, -2], ordered[:, -1])
    return -(right - other) / (ordered[:, -1] - ordered[:, -3] + 1e-12)


def total_balance_loss(routing: Sequence[RoutingRecord]) -> Tensor | float:
    """Return the sum over MoE layers of importance and load loss of all images, a scalar."""
    # It is added to the task loss of each of B images and counts B times in their sum: the gradient
    # is then B times that of *mean* task loss + weight · losses, which is what the paper maximises.
    # Source: adversarial-moe, eq. 12 and 16.
    return sum(
        squared_cv(record.probs.sum(dim=(0, 1))) + squared_cv(record.load.sum(dim=(0, 1)))
        for record in routing
    )


def routing_change_surrogate(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """Return how much probability has left the experts chosen ``before``, (B,)."""
    # A differentiable surrogate of 1 − IoU of chosen experts. before: (B, T, E) bool per MoE layer.
    # Sum over layers of the mean over tokens of −Σ_e (chosen_e / number chosen)·log p_e (none: 0).
    # A hash router has no gradient; adding 0 · prediction makes it 0 instead of undefined.
    values = 0.0 * output.prediction.float().sum(dim=1)
    for record, chosen in zip(output.routing, before, strict=True):
        share = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=1)
        log = record.probs.clamp_min(torch.finfo(record.probs.dtype).tiny).log()
        values = values - (share * log).sum(dim=-1).mean(dim=1)
    return values

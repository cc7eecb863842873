"""Base of the gradient attacks: objectives and their gradients.

An objective is one value per image, so step sizes can differ per image and their sum couples no
images. Pixels lie in [0, 1]; epsilon is in the same units (8/255, not 8). Volumes work too.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.attacks import base
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError, format_found_and_allowed
from moecore.core.routing_records import ModelOutput, RoutingRecord, choice_margin
from moecore.statistics.intervals import squared_cv
from moecore.tasks.base import Task

# Images (B, C, H, W) → the objective of each (B,), and the gradient of their sum.
ValueGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

OnRouting = Literal["routing_change", "routing_margin", "task_and_routing"]
Objective = Literal["task", "cross_entropy", "dlr", "targeted_dlr", "balance", OnRouting]
ROUTING_OBJECTIVES = get_args(OnRouting)
NO_ROUTING_TEXT = "the model has no MoE layer whose routing could change"
Goal = Callable[[ModelOutput], Tensor]  # a model's output for B images → the objective (B,)
MIN_CLASSES = {"dlr": 3, "targeted_dlr": 4}  # for the third and the fourth largest logit
Targets = int | Literal["all"] | None
DEFAULT_TARGETS = 9  # of each image, as in the authors' standard version
# In logits. A token with a larger excess has no gradient, so that other tokens decide it.
MAX_MARGIN_LOSS_PER_TOKEN = 0.1


class GradientAttack(base.BallAttack):
    """An attack along the gradient of an objective; subclasses define ``perturb_images``."""

    objective: Objective = Field(
        "task",
        description="task: its loss is maximised; balance: the routers' balance losses too; "
        "routing_margin: a token's next expert against its k-th; task_and_routing: both",
    )
    weight: float = Field(
        0.005,
        ge=0,
        description="Of the balance losses (`balance`) or the routing margin (`task_and_routing`), "
        "against the task loss.",
    )
    group: int = Field(100, ge=1, description="Images at once with `balance`, which couples them.")
    inside: bool = Field(False, description="Change only pixels that are not 0, no background.")
    targets: Targets = Field(
        None,
        description="Other classes that `targeted_dlr` aims at, one after the other, the most "
        f"likely first: a number of 1 or more, or all; null: {DEFAULT_TARGETS}, or all of fewer.",
    )

    @property
    def attempts(self) -> int:
        """Number of random starts, of which an image's largest objective counts."""
        return 1

    @property
    def together(self) -> int | None:
        return self.group if self.objective == "balance" else None

    @property
    def climbs_task(self) -> bool:
        return self.objective in ("task", "cross_entropy")

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (settings key, reason) if labels or classes do not allow the objective."""
        allowed = "allowed: task (the loss that is learned), balance, routing_change"
        reason = None if around.source is None else why_objective_fails(self.objective, around.task)
        classes = len(getattr(around.preview, "classes", None) or ())
        if reason:
            yield ("objective",), f"found {self.objective}: {reason} ({around.data}); {allowed}"
        elif classes and (lack := why_objective_lacks_classes(self.objective, classes)):
            text = f"found {self.objective}, but {around.data} has {classes} classes: {lack}"
            yield ("objective",), f"{text}; {allowed}, cross_entropy"
        elif classes and (lack := why_too_many_targets(self.targets, classes)):
            yield (), lack
        yield from super().misfits(around)

    def refuses(self, task: Task | type[Task]) -> str | None:
        reason = why_objective_fails(self.objective, task)
        return f"{self.kind} with {reason}" if reason else None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        if self.objective in ROUTING_OBJECTIVES and getattr(model, "moe", None) is None:
            return NO_ROUTING_TEXT
        return self.refuses(task)

    def __call__(
        self,
        model: nn.Module,
        task: Task,
        images: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: base.Generators = None,
    ) -> Tensor:
        centre = self.check_and_copy_images(images, epsilon)
        if epsilon == 0 or not len(centre):
            return centre
        size = self.together or len(centre)
        generators = base.expand_generator_to_images(generator, len(centre))
        attacked = []
        with frozen_parameters(model):
            for start in range(0, len(centre), size):
                rows = slice(start, start + size)
                may_change = changeable_pixels(model, centre[rows], self.inside)
                ball = base.Ball(centre[rows], epsilon, self.norm, may_change)
                goals = self._goals(model, task, centre[rows], labels[rows])
                starts = None if generators is None else generators[rows]
                gradients = [ModelGradient(model, goal, ball) for goal in goals]
                attacked.append(self._perturb_best(gradients * self.attempts, ball, starts))
        return torch.cat(attacked)

    def _goals(self, model: nn.Module, task: Task, images: Tensor, labels: Tensor) -> list[Goal]:
        """Return the objective, one for each target class if it is targeted."""
        if self.objective != "targeted_dlr" or why_objective_fails(self.objective, task):
            return [make_objective(self.objective, self.weight, model, task, images, labels)]
        rivals = other_classes_by_likelihood(predict_logits(model, images), labels)
        columns = rivals[:, : count_targets(self.targets, rivals.shape[1] + 1)].unbind(dim=1)
        return [partial(targeted_dlr_loss, labels=labels, targets=target) for target in columns]

    def _perturb_best(
        self, gradients: Sequence["ModelGradient"], ball: base.Ball, generator: base.ImageGenerators
    ) -> Tensor:
        """Return, per image, the result with the largest objective over starts and targets."""
        first, *repeats = gradients
        best = ball.restore_fixed_pixels(self.perturb_images(first, ball, generator))
        if not repeats:
            first.check_finite()
            return best
        values, _ = first(best)
        for at in repeats:
            images = ball.restore_fixed_pixels(self.perturb_images(at, ball, generator))
            new_values, _ = at(images)
            better = new_values > values
            best = base.pick_per_image(better, images, best)
            values = torch.where(better, new_values, values)
            at.check_finite()
        return best

    @abstractmethod
    def perturb_images(
        self, at: ValueGradient, ball: base.Ball, generator: base.ImageGenerators
    ) -> Tensor:
        """Return the attacked images (B, C, H, W) of ``ball``, whose ε is above 0."""
        # at: objective (B,) and gradient (B, C, H, W) at images. generator: draws the random start.


# Of the sum, so that an image's gradient does not depend on its batch. In fp32 (but see
# ``BFloat16Model``). Parameters, their ``grad`` and the model's mode do not change.
class ModelGradient:
    """``gradient(images)``: the objectives (B,), and the gradient (B, C, H, W) of their sum."""

    def __init__(
        self, model: nn.Module, goal: Goal, ball: base.Ball | None = None, samples: int = 1
    ) -> None:
        self.model = model
        self.goal = goal
        self.ball = ball  # pixels that it does not let change have gradient 0
        self.samples = samples  # passes whose gradients are averaged, of a model with noise
        self.prediction = torch.empty(0)  # (B, K), of the last pass
        # Per call, whether the gradient is finite, and the summed objective. Read once, at the end:
        # every check waits for the device.
        self._checks: list[tuple[Tensor, Tensor]] = []

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.ball is not None:
            images = self.ball.restore_fixed_pixels(images)
        values, gradient = self._run(images)
        for _ in range(self.samples - 1):
            values, more = self._run(images)
            gradient = gradient + more
        if self.samples > 1:
            gradient = gradient / self.samples
        if self.ball is not None and self.ball.may_change is not None:
            gradient = gradient * self.ball.may_change
        self._checks.append((torch.isfinite(gradient).all(), values.sum()))
        return values, gradient

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            leaf = images.detach().float().requires_grad_(True)
            output = self.model(leaf)
            output = output._replace(prediction=output.prediction.float())
            values = self.goal(output)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        self.prediction = output.prediction.detach()
        return values.detach(), gradient

    def check_finite(self) -> None:
        """Raise UserError if a gradient was not finite."""
        if not self._checks:
            return
        is_finite, losses = map(torch.stack, zip(*self._checks, strict=True))
        if not is_finite.all():
            raise not_finite_error(losses[~is_finite][0])


def not_finite_error(loss: Tensor) -> UserError:
    return UserError(
        f"attack: the loss ({float(loss):.4g}) has a gradient that is not finite; look for NaN or "
        "infinity in the model's weights"
    )


def compute_loss_gradient(model: nn.Module, task: Task, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient (B, C, H, W) of the summed task loss, in fp32; see ``ModelGradient``."""
    with frozen_parameters(model):
        at = ModelGradient(model, lambda output: task.attack_loss(output.prediction, labels))
        _, gradient = at(images)
        at.check_finite()
    return gradient


def changeable_pixels(model: nn.Module, images: Tensor, inside: bool = False) -> Tensor | None:
    """Return which pixels an attack may change, (B, C, H, W) bool; ``inside``: not 0; None: all."""
    # The last channel of some images holds the true kinds of patches: it may not change.
    says_truth = bool(getattr(getattr(model, "image", None), "truth", 0))
    if not inside and not says_truth:
        return None
    may_change = torch.ones_like(images, dtype=torch.bool)
    if inside:
        may_change &= (images != 0).any(dim=1, keepdim=True)
    if says_truth:
        may_change[:, -1] = False
    return may_change


def predict_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the model's predictions (B, K), in fp32, without a gradient."""
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        return model(images).prediction.float()


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


def why_objective_fails(objective: Objective, task: Task | type[Task]) -> str | None:
    """Return why an objective cannot be computed for a task's labels, in words; None if it can."""
    of_classes = objective in ("cross_entropy", *MIN_CLASSES)
    if of_classes and (reason := task.needs_classes("classes")):
        return f"objective {objective} needs classes, and {reason}"
    if objective in MIN_CLASSES and (reason := task.needs_classes("one_class")):
        return f"objective {objective} needs one label per image, and {reason}"
    return None


def why_objective_lacks_classes(objective: str, classes: int) -> str | None:
    """Return why an objective needs more classes, in words; None if it does not."""
    needed = MIN_CLASSES.get(objective, 0)
    if classes >= needed:
        return None
    rank = {"dlr": "third", "targeted_dlr": "fourth"}[objective]
    return f"it divides by a difference to the {rank} largest logit, so it needs {needed} or more"


def count_targets(targets: Targets, classes: int) -> int:
    """Return the number of other classes to aim at; UserError if there are fewer."""
    if reason := why_too_many_targets(targets, classes):
        raise UserError(f"attack: {reason}")
    if targets is None:
        return min(DEFAULT_TARGETS, classes - 1)
    if targets == "all":
        return classes - 1
    return targets


def why_too_many_targets(targets: Targets, classes: int) -> str | None:
    """Return a sentence if there are fewer other classes than ``targets``, else None."""
    if isinstance(targets, int) and not 1 <= targets < classes:
        allowed = f"1 to {classes - 1} or all, the other classes of {classes}"
        return f"targets: {format_found_and_allowed(found=targets, allowed=allowed)}"
    return None


def other_classes_by_likelihood(prediction: Tensor, labels: Tensor) -> Tensor:
    """Return all classes except each image's label, the most likely first, (B, K − 1)."""
    right = labels[:, None].long()
    return prediction.scatter(1, right, -torch.inf).sort(dim=1)[1].flip(1)[:, :-1]


def make_objective(
    objective: Objective,
    weight: float,  # of the balance losses
    model: nn.Module,
    task: Task,
    images: Tensor,
    labels: Tensor,
) -> Goal:
    """Return a function from the model's output for ``images`` to the objective of each, (B,)."""
    if reason := why_objective_fails(objective, task):
        raise UserError(f"attack: {reason}; choose objective task")
    if objective in ROUTING_OBJECTIVES:
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            before = [record.chosen for record in model(images).routing]
        if objective == "routing_change":
            return lambda output: routing_change_surrogate(output, before)
        if objective == "routing_margin":
            return lambda output: routing_margin_loss(output, before)
        return lambda output: (
            task.attack_loss(output.prediction, labels)
            + weight * routing_margin_loss(output, before)
        )
    if objective == "dlr":
        return lambda output: dlr_loss(output.prediction, labels)
    if objective == "balance":
        return lambda output: (
            task.attack_loss(output.prediction, labels)
            + weight * compute_batch_balance_loss(output.routing)
        )
    return lambda output: task.attack_loss(output.prediction, labels)


def dlr_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    """Return the difference of logits ratio −(z_y − max_{i≠y} z_i) / (z_π1 − z_π3), (B,)."""
    # Positive where the image is misclassified; invariant to shift and scale of the logits (B, K).
    # Fewer than 3 classes have no third largest logit z_π3. Source: Croce & Hein (2020), eq. 6.
    _check_enough_classes("dlr", prediction)
    ordered, classes = prediction.sort(dim=1)
    right = prediction.gather(1, labels[:, None].long())[:, 0]
    other = torch.where(classes[:, -1] == labels, ordered[:, -2], ordered[:, -1])
    return -(right - other) / (ordered[:, -1] - ordered[:, -3] + 1e-12)


def targeted_dlr_loss(output: ModelOutput, labels: Tensor, targets: Tensor) -> Tensor:
    """Return −(z_y − z_t) / (z_π1 − (z_π3 + z_π4) / 2), (B,), of target classes (B,)."""
    # Positive where the target beats the label. Source: Croce & Hein (2020), eq. 7.
    logits = output.prediction
    _check_enough_classes("targeted_dlr", logits)
    ordered = logits.sort(dim=1)[0]
    right, target = (logits.gather(1, each[:, None].long())[:, 0] for each in (labels, targets))
    scale = ordered[:, -1] - 0.5 * (ordered[:, -3] + ordered[:, -4])
    return -(right - target) / (scale + 1e-12)


def _check_enough_classes(objective: str, prediction: Tensor) -> None:
    classes = prediction.shape[1]
    if reason := why_objective_lacks_classes(objective, classes):
        raise UserError.at(
            "attack.objective",
            found=f"{objective}, but the model has {classes} classes: {reason}",
            allowed="cross_entropy",
        )


def compute_batch_balance_loss(routing: Sequence[RoutingRecord]) -> Tensor | float:
    """Return the sum over MoE layers of importance and load loss of all images, a scalar."""
    # It is added to the task loss of each of B images and counts B times in their sum: the gradient
    # is then B times that of *mean* task loss + weight · losses, which is what the paper maximises.
    # Source: adversarial-moe, eq. 12 and 16.
    return sum(
        squared_cv(record.probs.sum(dim=(0, 1))) + squared_cv(record.load.sum(dim=(0, 1)))
        for record in routing
    )


def routing_change_surrogate(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """Return −log probability of the clean image's experts ``before``, (B,); attacks raise it."""
    # A differentiable surrogate of 1 − IoU of chosen experts. before: (B, T, E) bool per MoE layer.
    # Sum over layers of the mean over tokens of −Σ_e (chosen_e / number chosen)·log p_e (none: 0).
    # A hash router has no gradient; adding 0 · prediction makes it 0 instead of undefined.
    values = 0.0 * output.prediction.float().sum(dim=1)
    for record, chosen in zip(output.routing, before, strict=True):
        share = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=1)
        log = record.probs.clamp_min(torch.finfo(record.probs.dtype).tiny).log()
        values = values - (share * log).sum(dim=-1).mean(dim=1)
    return values


def routing_margin_loss(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """Return token means (B,): best other logit − lowest logit of the clean choice, ``before``."""
    # before: (B, T, E) bool per MoE layer, the clean choice, which changes above 0. Sum over layers
    # of the mean over tokens; 0 for a token that chose no or every expert. 0 · prediction, as a
    # hash has no gradient.
    values = 0.0 * output.prediction.float().sum(dim=1)
    for record, chosen in zip(output.routing, before, strict=True):
        excess = -choice_margin(record.logits, chosen).nan_to_num(0.0)
        values = values + excess.clamp(max=MAX_MARGIN_LOSS_PER_TOKEN).mean(dim=1).to(values.dtype)
    return values

"""What every gradient attack shares: the gradient with respect to the images, and where they stay.

B images, C channels, H × W pixels in [0, 1]; epsilon is in the same units (8/255, not 8). Volumes
(B, C, D, H, W) are attacked alike.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.attacks.base import Attack, Generators, ImageGenerators, expand_generators
from moecore.attacks.gradient import Goal, Objective, make_objective, objective_refusal
from moecore.core.files import UserError
from moecore.tasks.base import Task

# Images (B, C, H, W) → the objective of each (B,), and the gradient of their sum.
ObjectiveGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


class Ball(NamedTuple):
    """Where attacked images stay: in [0, 1], within ``epsilon`` of the clean ones (L∞)."""

    centre: Tensor  # (B, C, H, W), the clean images
    epsilon: float

    def project(self, images: Tensor) -> Tensor:
        """Return the nearest images inside, (B, C, H, W)."""
        return images.clamp(self.centre - self.epsilon, self.centre + self.epsilon).clamp(0, 1)


class GradientAttack(Attack):
    """An attack along the gradient of an objective; its parts define ``perturb_images``."""

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
        if self.objective == "balance":
            return self.group
        return None

    @property
    def climbs_task(self) -> bool:
        return self.objective in ("task", "cross_entropy")

    def refuses(self, task: Task) -> str | None:
        reason = objective_refusal(self.objective, task)
        if reason:
            return f"{self.kind} with {reason}"
        return None

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
        centre = check_and_copy_images(images, epsilon)
        if epsilon == 0 or not len(centre):
            return centre
        size = self.together or len(centre)
        each = expand_generators(generator, len(centre))
        made = []
        with frozen_parameters(model):
            for start in range(0, len(centre), size):
                part = slice(start, start + size)
                goal = make_objective(
                    self.objective, self.weight, model, task, centre[part], labels[part]
                )
                drawn = None if each is None else each[part]
                at = ModelGradient(model, goal)
                made.append(self._perturb_inside(at, Ball(centre[part], epsilon), drawn))
                at.check_finite()
        return torch.cat(made)

    def _perturb_inside(
        self, at: "ModelGradient", ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        """The attack, of what may change: where ``inside`` no background, and never the truth."""
        if not self.inside and not at.says_truth:
            return self.perturb_images(at, ball, generator)
        there = torch.ones_like(ball.centre, dtype=torch.bool)
        if self.inside:
            there &= (ball.centre != 0).any(dim=1, keepdim=True)
        if at.says_truth:
            there[:, -1] = False

        def within(images: Tensor) -> tuple[Tensor, Tensor]:
            values, gradient = at(torch.where(there, images, ball.centre))
            return values, gradient * there

        return torch.where(there, self.perturb_images(within, ball, generator), ball.centre)

    @abstractmethod
    def perturb_images(
        self, at: ObjectiveGradient, ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        """Return the attacked images (B, C, H, W) of ``ball``, whose ε is above 0.

        at: gives objective and gradient. generator: draws the random start; ValueError without it.
        """


class ModelGradient:
    """Called with images: the objective of each (B,) and the gradient (B, C, H, W) of their *sum*.

    Of the sum, so that an image's does not depend on its batch. In fp32 (a model may round inside,
    see moecore.attacks.attack_setup). The parameters, their ``grad`` and the model's mode stay as
    they are. Whether all was finite is asked once, at the end: the device is not waited for before.
    """

    def __init__(self, model: nn.Module, goal: Goal) -> None:
        self.model = model
        self.goal = goal
        self.finite: Tensor | None = None
        self.value = torch.zeros(())  # the summed objective when it was finite no more

    @property
    def says_truth(self) -> bool:
        """Return whether the images' last channel is the truth of generated data."""
        return bool(getattr(getattr(self.model, "image", None), "truth", 0))

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            leaf = images.detach().float().requires_grad_(True)
            output = self.model(leaf)
            values = self.goal(output._replace(prediction=output.prediction.float()))
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        values = values.detach()
        before = self.finite
        finite = torch.isfinite(gradient).all()
        if before is None:
            self.finite, self.value = finite, values.sum()
        else:
            self.finite, self.value = before & finite, values.sum().where(before, self.value)
        return values, gradient

    def check_finite(self) -> None:
        """Raise UserError where a gradient was not finite: its sign was meaningless."""
        if self.finite is not None and not self.finite:
            raise UserError(
                f"attack: the loss ({float(self.value):.4g}) has a gradient that is not finite; "
                "look for NaN or infinity in the model's weights"
            )


def image_gradient(model: nn.Module, task: Task, images: Tensor, labels: Tensor) -> Tensor:
    """Gradient (B, C, H, W) of the summed task loss, in fp32; see ``ModelGradient``."""
    with frozen_parameters(model):
        at = ModelGradient(model, lambda output: task.attack_loss(output.prediction, labels))
        _, gradient = at(images)
        at.check_finite()
    return gradient


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """No parameter takes a gradient inside.

    Experts' custom gradients are not computed for weights then, about a third of the work.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def check_and_copy_images(images: Tensor, epsilon: float) -> Tensor:
    """Check what an attack is given; return its own fp32 copy of the images.

    Raises ValueError for images that are not floating point in [0, 1], and for an epsilon below 0.
    """
    if not images.is_floating_point():
        raise ValueError(f"attack: images are {images.dtype}; floating point in [0, 1] is needed")
    if images.numel() and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"attack: images are in [{images.min():.4g}, {images.max():.4g}]; [0, 1] is needed"
        )
    # Written so that NaN is refused too.
    if not epsilon >= 0:
        raise ValueError(f"attack: epsilon is {epsilon}; 0 or more is needed")
    return images.detach().to(torch.float32, copy=True)

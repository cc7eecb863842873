"""Auto-PGD (Croce & Hein 2020, algorithm 1), equal to their code step by step."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import Ball, ImageGenerators, pick_per_image, random_start, unsqueeze_like
from moecore.attacks.gradient import GradientAttack, ValueGradient

SHARE_OF_NEW_STEP = 0.75  # share of the new step; the rest is the previous step
MIN_RISING_SHARE = 0.75  # ρ: of the steps, must raise the objective to keep the step size


class Apgd(GradientAttack):
    """PGD with momentum and a step size per image, 2ε at first.

    Where steps no longer raise the objective, the step size is halved and the search restarts from
    the image's best point.
    """

    kind: Literal["apgd"] = "apgd"
    steps: int = Field(100, ge=1, description="Number of gradient steps.")
    restarts: int = Field(1, ge=1, description="Random starts; the largest objective counts.")

    @property
    def attempts(self) -> int:
        return self.restarts

    def perturb_images(self, at: ValueGradient, ball: Ball, generator: ImageGenerators) -> Tensor:
        return apgd_ascent(at, ball, random_start(ball, generator), self.steps).images


class AscentResult(NamedTuple):
    """Best images found by ``apgd_ascent``, and objective and step size of each of its N steps."""

    images: Tensor  # (B, C, H, W), the best
    values: Tensor  # (B,), their objective
    history: Tensor  # (N, B), the objective after each step
    sizes: Tensor  # (N, B), the step size of each step
    wrong: Tensor  # (B, C, H, W), the last misclassified images, by ``is_wrong``, or the start


def yield_step_size_checks(steps: int) -> Iterator[int]:
    """Yield the steps at which step sizes may change: after 22 % of all, then ever more often."""
    length, shrinkage, min_length = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checkpoint = length
    while checkpoint <= steps:
        yield checkpoint
        length = max(length - shrinkage, min_length)
        checkpoint += length


def apgd_ascent(
    at: ValueGradient,
    ball: Ball,
    start: Tensor,
    steps: int,
    is_wrong: Callable[[], Tensor] | None = None,
) -> AscentResult:
    """Maximise ``at`` in the ball from ``start`` (B, C, H, W); ``is_wrong`` only sets ``wrong``."""
    # is_wrong: whether the images of the last call of ``at`` are misclassified, (B,).
    current = previous = best = wrong = start
    values, gradient = at(current)
    best_values = values
    best_gradient = gradient
    size = torch.full_like(values, 2 * ball.epsilon)
    checks = set(yield_step_size_checks(steps))
    # Per image, what decides whether its step size still helps (conditions 1 and 2 of §3.1). The
    # first step is compared with 0, not with the start, as in the authors' code.
    last = rises = torch.zeros_like(values)
    checked_step = 0
    checked_values = values
    halved = torch.ones_like(values, dtype=torch.bool)
    history = []
    sizes = []
    for step in range(1, steps + 1):
        # The first step has no previous step.
        momentum = SHARE_OF_NEW_STEP if step > 1 else 1.0
        target = ball.project(current + unsqueeze_like(size, start) * ball.direction(gradient))
        moved = current + (target - current) * momentum + (current - previous) * (1 - momentum)
        previous = current
        current = ball.project(moved)
        values, gradient = at(current)
        if is_wrong is not None:
            wrong = pick_per_image(is_wrong(), current, wrong)
        history.append(values)
        sizes.append(size)
        better = values > best_values
        best = pick_per_image(better, current, best)
        best_gradient = pick_per_image(better, gradient, best_gradient)
        best_values = torch.where(better, values, best_values)
        rises = rises + (values > last)
        last = values
        if step in checks:
            # Too few rises, or the step size was kept last time and the best value did not grow.
            few = rises <= MIN_RISING_SHARE * (step - checked_step)
            halved = few | ~halved & (checked_values >= best_values)
            rises = torch.zeros_like(rises)
            checked_step = step
            checked_values = best_values
            size = torch.where(halved, size / 2, size)
            current = pick_per_image(halved, best, current)
            gradient = pick_per_image(halved, best_gradient, gradient)
    return AscentResult(best, best_values, torch.stack(history), torch.stack(sizes), wrong)

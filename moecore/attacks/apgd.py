"""Auto-PGD on the L∞ ball (Croce & Hein 2020, algorithm 1), equal to their code step by step."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import ImageGenerators, uniform_noise_like
from moecore.attacks.gradient import Ball, GradientAttack, ObjectiveGradient

MOMENTUM = 0.75  # share of the new step; the rest is the previous step
MIN_RISES = 0.75  # ρ: share of the steps that must raise the objective to keep the step size


class Apgd(GradientAttack):
    """PGD with momentum and a step size per image, 2ε at first.

    Where steps no longer raise the objective, the step size is halved and the search restarts from
    the image's best point.
    """

    kind: Literal["apgd"] = "apgd"
    steps: int = Field(100, ge=1, description="Number of gradient steps.")

    def perturb_images(
        self, at: ObjectiveGradient, ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        return apgd_ascent(at, ball, random_start(ball, generator), self.steps).images


class AscentResult(NamedTuple):
    """The best images of an ascent, and its history over N steps."""

    images: Tensor  # (B, C, H, W), the best
    values: Tensor  # (B,), their objective
    history: Tensor  # (N, B), the objective after each step
    sizes: Tensor  # (N, B), the step size of each step


def random_start(ball: Ball, generator: ImageGenerators) -> Tensor:
    """Return the clean images plus uniform noise with a maximum of ε per image, in [0, 1]."""
    noise = uniform_noise_like(ball.centre, generator, "apgd")
    axes = tuple(range(1, noise.ndim))
    # 1e-12 as in the authors' code, for an image whose noise is all zeros.
    largest = noise.abs().amax(dim=axes, keepdim=True) + 1e-12
    return (ball.centre + ball.epsilon * noise / largest).clamp(0, 1)


def step_checkpoints(steps: int) -> Iterator[int]:
    """Yield the steps at which step sizes may change: after 22 % of all, then ever more often."""
    length, shrinkage, min_length = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checkpoint = length
    while checkpoint <= steps:
        yield checkpoint
        length = max(length - shrinkage, min_length)
        checkpoint += length


def apgd_ascent(at: ObjectiveGradient, ball: Ball, start: Tensor, steps: int) -> AscentResult:
    """Return best images, and history, of ascent from ``start`` (B, C, H, W) in the ball."""
    current = previous = best = start
    values, gradient = at(current)
    best_values = values
    best_gradient = gradient
    size = torch.full_like(values, 2 * ball.epsilon)
    checks = set(step_checkpoints(steps))
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
        momentum = MOMENTUM if step > 1 else 1.0
        step_size = _broadcast_over_pixels(size, start)
        target = ball.project(current + step_size * gradient.sign())
        moved = current + (target - current) * momentum + (current - previous) * (1 - momentum)
        previous = current
        current = ball.project(moved)
        values, gradient = at(current)
        history.append(values)
        sizes.append(size)
        better = values > best_values
        best = _where_chosen(better, current, best)
        best_gradient = _where_chosen(better, gradient, best_gradient)
        best_values = torch.where(better, values, best_values)
        rises = rises + (values > last)
        last = values
        if step in checks:
            # Too few rises, or the step size was kept last time and the best value did not grow.
            few = rises <= MIN_RISES * (step - checked_step)
            halved = few | ~halved & (checked_values >= best_values)
            rises = torch.zeros_like(rises)
            checked_step = step
            checked_values = best_values
            size = torch.where(halved, size / 2, size)
            current = _where_chosen(halved, best, current)
            gradient = _where_chosen(halved, best_gradient, gradient)
    return AscentResult(best, best_values, torch.stack(history), torch.stack(sizes))


def _broadcast_over_pixels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _where_chosen(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(_broadcast_over_pixels(chosen, new), new, old)

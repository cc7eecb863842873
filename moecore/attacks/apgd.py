"""Auto-PGD on the L∞ ball with any objective, in step with the authors' own code.

B images, C channels, H × W pixels. Source: Croce & Hein (2020), algorithm 1.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import ImageGenerators, uniform_noise_like
from moecore.attacks.gradient import Ball, GradientAttack, ObjectiveGradient

MOMENTUM = 0.75  # share of the new step; the rest is the step before it
RISES = 0.75  # ρ: a step size is kept where more than this share of its steps raised the objective


class Apgd(GradientAttack):
    """PGD with momentum that halves an image's step size, 2ε at first, where it no longer helps.

    It then goes on from the best image so far.
    """

    kind: Literal["apgd"] = "apgd"
    steps: int = Field(100, ge=1, description="Number of gradient steps.")

    def perturb_images(
        self, at: ObjectiveGradient, ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        start = random_start(ball, generator, "apgd")
        return apgd_ascent(at, ball, start, self.steps).images


class AscentResult(NamedTuple):
    """What an ascent reached, and what happened in each of N steps."""

    images: Tensor  # (B, C, H, W), the best
    values: Tensor  # (B,), their objective
    history: Tensor  # (N, B), the objective after each step
    sizes: Tensor  # (N, B), the step size of each step


def random_start(ball: Ball, generator: ImageGenerators, who: str) -> Tensor:
    """Return the clean images and uniform noise whose largest pixel is at ±ε, within [0, 1]."""
    noise = uniform_noise_like(ball.centre, generator, who)
    axes = tuple(range(1, noise.ndim))
    # The authors' own guard against an image whose noise is all zeros.
    largest = noise.abs().amax(dim=axes, keepdim=True) + 1e-12
    return (ball.centre + ball.epsilon * noise / largest).clamp(0, 1)


def step_checkpoints(steps: int) -> Iterator[int]:
    """The steps after which step sizes may change: first after 0.22, then ever sooner by 0.03."""
    length, shrink, least = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    done = length
    while done <= steps:
        yield done
        length = max(length - shrink, least)
        done += length


def apgd_ascent(at: ObjectiveGradient, ball: Ball, start: Tensor, steps: int) -> AscentResult:
    """Ascend from ``start`` (B, C, H, W) within the ball."""
    current = previous = best = start
    values, gradient = at(current)
    best_values = values
    best_gradient = gradient
    size = torch.full_like(values, 2 * ball.epsilon)
    progress = _Progress(values)
    checks = set(step_checkpoints(steps))
    history = []
    sizes = []
    for step in range(1, steps + 1):
        # The first step has no step before it to lean on.
        momentum = MOMENTUM if step > 1 else 1.0
        wide = _broadcast_over_pixels(size, start)
        plain = ball.project(current + wide * gradient.sign())
        moved = current + (plain - current) * momentum + (current - previous) * (1 - momentum)
        previous = current
        current = ball.project(moved)
        values, gradient = at(current)
        history.append(values)
        sizes.append(size)
        better = values > best_values
        best = _where_chosen(better, current, best)
        best_gradient = _where_chosen(better, gradient, best_gradient)
        best_values = torch.where(better, values, best_values)
        progress.note(values)
        if step in checks:
            halved = progress.images_to_halve(best_values)
            size = torch.where(halved, size / 2, size)
            current = _where_chosen(halved, best, current)
            gradient = _where_chosen(halved, best_gradient, gradient)
    return AscentResult(best, best_values, torch.stack(history), torch.stack(sizes))


class _Progress:
    """Whether a step size still helps, image by image (conditions 1 and 2 of §3.1)."""

    def __init__(self, values: Tensor) -> None:
        # The authors' code compares the first step with 0, not with the start; we do as they do.
        self.last = torch.zeros_like(values)
        self.rises = torch.zeros_like(values)
        self.steps = 0
        self.best = values
        self.halved = torch.ones_like(values, dtype=torch.bool)

    def note(self, values: Tensor) -> None:
        """One more step led to these objectives (B,)."""
        self.rises = self.rises + (values > self.last)
        self.last = values
        self.steps += 1

    def images_to_halve(self, best: Tensor) -> Tensor:
        """At a checkpoint: where to halve, (B,) bool.

        Too few rises, or the old size was kept and the best objectives (B,) did not grow.
        """
        few = self.rises <= RISES * self.steps
        halve = few | ~self.halved & (self.best >= best)
        self.rises = torch.zeros_like(self.rises)
        self.steps = 0
        self.best = best
        self.halved = halve
        return halve


def _broadcast_over_pixels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _where_chosen(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(_broadcast_over_pixels(chosen, new), new, old)

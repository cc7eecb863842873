"""Projected gradient descent as in Puigcerver et al. (2022), and stronger (Madry et al. 2018)."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from moecore.attacks.base import Ball, ImageGenerators, random_start, uniform_noise_like
from moecore.attacks.gradient import GradientAttack, ValueGradient


class Pgd(GradientAttack):
    """Gradient steps (in L∞ their signs), each projected to the ball and [0, 1]."""

    kind: Literal["pgd"] = "pgd"
    steps: int = Field(40, ge=1, description="Number of gradient steps τ.")
    form: Literal["paper", "strong"] = Field(
        "paper", description="paper: step ε/τ from the clean image. strong: 2.5·ε/τ, random start."
    )
    restarts: int = Field(1, ge=1, description="Random starts, strong form; the largest counts.")
    length: float = Field(2.5, gt=0, description="Step of the strong form, in units of ε/τ.")

    @model_validator(mode="after")
    def _check_restarts_are_random(self) -> Self:
        if self.restarts > 1 and self.form == "paper":
            raise ValueError(f"found restarts {self.restarts}; allowed: 1 without form: strong")
        return self

    @property
    def attempts(self) -> int:
        return self.restarts

    def perturb_images(self, at: ValueGradient, ball: Ball, generator: ImageGenerators) -> Tensor:
        size = ball.epsilon / self.steps
        current = ball.centre
        if self.form == "strong":
            size *= self.length
            who = "pgd in its strong form"
            if ball.norm == "linf":
                noise = uniform_noise_like(ball.centre, generator, who)
                current = ball.project(ball.centre + ball.epsilon * noise)
            else:
                current = random_start(ball, generator, who)
        for _ in range(self.steps):
            current = ball.project(current + size * ball.direction(at(current)[1]))
        return current

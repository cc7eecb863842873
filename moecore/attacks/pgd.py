"""Projected gradient descent as in Puigcerver et al. (2022), and stronger (Madry et al. 2018)."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from moecore.attacks.base import ImageGenerators, uniform_noise_like
from moecore.attacks.gradient import Ball, GradientAttack, ObjectiveGradient


class Pgd(GradientAttack):
    """Signed gradient steps from the current iterate, each projected to the ball and [0, 1]."""

    kind: Literal["pgd"] = "pgd"
    steps: int = Field(40, ge=1, description="Number of gradient steps τ.")
    form: Literal["paper", "strong"] = Field(
        "paper", description="paper: step ε/τ from the clean image. strong: 2.5·ε/τ, random start."
    )

    def perturb_images(
        self, at: ObjectiveGradient, ball: Ball, generator: ImageGenerators
    ) -> Tensor:
        strong = self.form == "strong"
        size = ball.epsilon / self.steps * (2.5 if strong else 1.0)
        current = ball.centre
        if strong:
            noise = uniform_noise_like(ball.centre, generator, "pgd in its strong form")
            current = ball.project(ball.centre + ball.epsilon * noise)
        for _ in range(self.steps):
            current = ball.project(current + size * at(current)[1].sign())
        return current

"""Projected gradient descent on the L∞ ball.

In the form of Puigcerver et al. (2022) and in the stronger usual form (Madry et al., 2018).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import uniform_noise
from moecore.attacks.gradient import GradientAttack, ObjectiveGradient, project_to_ball


class Pgd(GradientAttack):
    """Signed gradient steps from the current iterate, each projected to the ball and [0, 1]."""

    kind: Literal["pgd"] = "pgd"
    steps: int = Field(40, ge=1, description="Number of gradient steps τ.")
    form: Literal["paper", "strong"] = Field(
        "paper",
        description="paper: step ε/τ from the clean image (Puigcerver et al., 2022). strong: step "
        "2.5·ε/τ from a random start in the ball.",
    )

    def perturb_images(
        self,
        at: ObjectiveGradient,
        centre: Tensor,
        epsilon: float,
        generator: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """The last iterate. Raises ValueError where the strong form gets no generator."""
        strong = self.form == "strong"
        size = epsilon / self.steps * (2.5 if strong else 1.0)
        current = centre
        if strong:
            noise = uniform_noise(centre, generator, "pgd in its strong form")
            current = project_to_ball(centre + epsilon * noise, centre, epsilon)
        for _ in range(self.steps):
            current = project_to_ball(current + size * at(current)[1].sign(), centre, epsilon)
        return current

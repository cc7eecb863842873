"""Projected gradient descent on the L∞ ball, in the form of paper 002 and in the stronger usual form (Madry et al., 2018)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.gradient import clean, image_gradient, project
from moecore.config import Config


class Pgd(Config):
    """Repeated signed gradient steps, each from the current iterate, each projected back to the ball and to [0, 1]."""

    kind: Literal["pgd"] = "pgd"
    steps: int = Field(40, ge=1, description="Number of gradient steps τ.")
    form: Literal["paper", "strong"] = Field(
        "paper", description="paper: step ε/τ from the clean image (paper 002). strong: step 2.5·ε/τ from a random start in the ball."
    )

    def __call__(self, model, images: Tensor, labels: Tensor, epsilon: float, generator: torch.Generator | None = None) -> Tensor:
        """Adversarial images.

        images: (B, C, H, W) in [0, 1]; labels: (B,); epsilon: radius of the L∞ ball, in pixel units; generator: on the CPU,
        draws the random start image by image, so that the start does not depend on the size of the batches.
        Returns (B, C, H, W), fp32, detached, in [0, 1].  Raises ValueError where the strong form gets no generator.
        """
        centre = clean(images, epsilon)
        if epsilon == 0:
            return centre
        size = epsilon / self.steps * (2.5 if self.form == "strong" else 1.0)
        current = project(centre + _start(centre, epsilon, generator), centre, epsilon) if self.form == "strong" else centre
        for _ in range(self.steps):
            current = project(current + size * image_gradient(model, current, labels).sign(), centre, epsilon)
        return current


def _start(images: Tensor, epsilon: float, generator: torch.Generator | None) -> Tensor:
    """Uniform noise in [-epsilon, epsilon], (B, C, H, W)."""
    if generator is None:
        raise ValueError("attack: pgd in its strong form draws a random start; pass a CPU generator")
    noise = [torch.rand(image.shape, generator=generator) for image in images]
    return epsilon * (2 * torch.stack(noise) - 1).to(images.device) if noise else torch.zeros_like(images)

"""The fast gradient sign method (Goodfellow et al., 2015)."""

from typing import Literal

import torch
from torch import Tensor

from moecore.attacks.gradient import clean, image_gradient, project
from moecore.config import Config


class Fgsm(Config):
    """One step of size epsilon along the sign of the loss gradient."""

    kind: Literal["fgsm"] = "fgsm"

    def __call__(self, model, images: Tensor, labels: Tensor, epsilon: float, generator: torch.Generator | None = None) -> Tensor:
        """Adversarial images.

        images: (B, C, H, W) in [0, 1]; labels: (B,); epsilon: radius of the L∞ ball, in pixel units.
        Returns (B, C, H, W), fp32, detached, in [0, 1]. The generator is not used: nothing is drawn.
        """
        start = clean(images, epsilon)
        if epsilon == 0:
            return start
        return project(start + epsilon * image_gradient(model, start, labels).sign(), start, epsilon)

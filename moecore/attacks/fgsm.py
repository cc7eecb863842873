"""The fast gradient sign method (Goodfellow et al., 2015)."""

from typing import Literal

from torch import Tensor

from moecore.attacks.base import Ball, ImageGenerators
from moecore.attacks.gradient import GradientAttack, ValueGradient


class Fgsm(GradientAttack):
    """One step of size epsilon along the gradient (in L∞ its sign); deterministic."""

    kind: Literal["fgsm"] = "fgsm"

    def perturb_images(self, at: ValueGradient, ball: Ball, generator: ImageGenerators) -> Tensor:
        return ball.project(ball.centre + ball.epsilon * ball.direction(at(ball.centre)[1]))

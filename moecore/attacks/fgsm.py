"""The fast gradient sign method (Goodfellow et al., 2015)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moecore.attacks.gradient import GradientAttack, ObjectiveGradient, project_to_ball


class Fgsm(GradientAttack):
    """One step of size epsilon along the sign of the objective's gradient; nothing is drawn."""

    kind: Literal["fgsm"] = "fgsm"

    def perturb_images(
        self,
        at: ObjectiveGradient,
        centre: Tensor,
        epsilon: float,
        generator: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """x + ε·sign ∇; the generator is not used."""
        return project_to_ball(centre + epsilon * at(centre)[1].sign(), centre, epsilon)

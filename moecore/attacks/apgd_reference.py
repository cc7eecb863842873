"""Auto-PGD by its authors' code, from the package pyautoattack (Croce & Hein 2020): the oracle of our own ``apgd``."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pyautoattack.autopgd_base import APGDAttack
from pydantic import Field
from torch import Tensor

from moecore.attacks.apgd import random_start
from moecore.attacks.reference import ReferenceAttack
from moecore.files import StageError


class ApgdReference(ReferenceAttack):
    """The reference implementation, from the same start as ``apgd``; it returns the image of the highest loss."""

    kind: Literal["apgd_reference"] = "apgd_reference"
    loss: Literal["ce", "dlr"] = Field("ce", description="Cross-entropy, or the difference of logits ratio (at least 3 classes).")
    steps: int = Field(100, ge=1, description="Number of gradient steps.")

    def perturbed(
        self, logits: Callable[[Tensor], Tensor], centre: Tensor, labels: Tensor, epsilon: float, generator: Sequence[torch.Generator] | None
    ) -> Tensor:
        """The image of the highest loss. Raises StageError where dlr has fewer than 3 classes, ValueError without a generator."""
        start = random_start(centre, epsilon, generator, "apgd_reference")
        if self.loss == "dlr":
            with torch.no_grad():
                classes = logits(centre[:1]).shape[1]
            if classes < 3:
                raise StageError(f"attack: apgd_reference with loss dlr needs at least 3 classes, and the model has {classes}; choose ce")
        quiet = logging.getLogger("moecore.pyautoattack")  # images without a gradient are counted by the audit
        attack = APGDAttack(logits, n_iter=self.steps, eps=epsilon, loss=self.loss, device=centre.device, logger=quiet)
        attack.init_hyperparam(centre)
        return attack.attack_single_run(centre, labels, x_init=start)[0]

"""Auto-PGD by its authors' code, from the package pyautoattack: the oracle of our own ``apgd``.

Source: Croce & Hein (2020).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pyautoattack.autopgd_base import APGDAttack
from pydantic import Field
from torch import Tensor

from moecore.attacks.apgd import random_start
from moecore.attacks.reference import ReferenceAttack
from moecore.core.files import UserError


class ApgdReference(ReferenceAttack):
    """The reference implementation, from the same start as ``apgd``."""

    kind: Literal["apgd_reference"] = "apgd_reference"
    loss: Literal["ce", "dlr"] = Field(
        "ce", description="Cross-entropy, or the difference of logits ratio (at least 3 classes)."
    )
    steps: int = Field(100, ge=1, description="Number of gradient steps.")

    @property
    def climbs_task(self) -> bool:
        return self.loss == "ce"

    def perturbed(
        self,
        logits: Callable[[Tensor], Tensor],
        centre: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """The image of the highest loss.

        Raises UserError where dlr has fewer than 3 classes, ValueError without a generator.
        """
        start = random_start(centre, epsilon, generator, "apgd_reference")
        if self.loss == "dlr":
            with torch.no_grad():
                classes = logits(centre[:1]).shape[1]
            if classes < 3:
                raise UserError(
                    "attack: apgd_reference with loss dlr needs at least 3 classes, and the model "
                    f"has {classes}; choose ce"
                )
        # It would warn of images without a gradient; the audit counts them.
        quiet = logging.getLogger("moecore.pyautoattack")
        attack = APGDAttack(
            logits,
            n_iter=self.steps,
            eps=epsilon,
            loss=self.loss,
            device=centre.device,
            logger=quiet,
        )
        attack.init_hyperparam(centre)
        return attack.attack_single_run(centre, labels, x_init=start)[0]

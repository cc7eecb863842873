"""AutoAttack (Croce & Hein 2020): four attacks, each on the images that survived the others."""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moecore.attacks import base, gradient
from moecore.attacks.apgd import apgd_ascent
from moecore.attacks.fab import Fab
from moecore.attacks.gradient import Goal, ModelGradient, Targets, count_targets
from moecore.attacks.square import Square
from moecore.attacks.survivor_attack import SurvivorAttack, Trial, Victims
from moecore.nn import predict

RESTARTS = 5  # of version plus
PASSES_PER_GRADIENT = 20  # passes per gradient of version rand
NO_NOISE_TEXT = (
    "version rand averages gradients over noise, and this model draws none in evaluation; "
    "allowed: standard or plus"
)


class Autoattack(SurvivorAttack):
    """APGD on cross-entropy and targeted DLR, targeted FAB and Square, in this order."""

    kind: Literal["autoattack"] = "autoattack"
    version: Literal["standard", "plus", "rand"] = Field(
        "standard",
        description="plus: also 5 starts of APGD-CE, APGD-DLR and FAB without targets. rand: only "
        "APGD-CE and APGD-DLR, of models with noise, whose gradients are means of 20 passes.",
    )
    steps: int = Field(100, ge=1, description="Of APGD and FAB.")
    queries: int = Field(5000, ge=1, description="Of Square.")
    targets: Targets = Field(None, description="Of APGD-T and FAB-T, as of `targeted_dlr`.")

    def why_too_few_classes(self, classes: int) -> str | None:
        objective = "dlr" if self.version == "rand" else "targeted_dlr"
        if reason := gradient.why_objective_lacks_classes(objective, classes):
            return (
                f"autoattack's {objective} does not exist for {classes} classes: {reason}; "
                "allowed: apgd with objective cross_entropy, fab and square, each of its own"
            )
        return gradient.why_too_many_targets(self.targets, classes)

    def why_pointless_for_model(self, model: nn.Module, images: Tensor) -> str | None:
        if self.version != "rand":
            return None
        with predict.eval_mode(model):
            first, second = (gradient.predict_logits(model, images) for _ in range(2))
        return NO_NOISE_TEXT if torch.equal(first, second) else None

    def trials(self, classes: int) -> list[Trial]:
        climb = partial(climb_to_last_misclassified_images, steps=self.steps)
        dlr = partial(climb, objective="dlr")
        if self.version == "rand":
            return [partial(each, samples=PASSES_PER_GRADIENT) for each in (climb, dlr)]
        ranks = range(count_targets(self.targets, classes))
        targeted = [partial(climb, objective="targeted_dlr", rank=rank) for rank in ranks]
        fab = Fab(steps=self.steps, targets=self.targets).trials(classes)
        square = Square(queries=self.queries).trials(classes)
        if self.version == "standard":
            return [climb, *targeted, *fab, *square]
        free = Fab(steps=self.steps, aim="nearest", restarts=RESTARTS).trials(classes)
        return [*[climb] * RESTARTS, *[dlr] * RESTARTS, *free, *square, *targeted, *fab]


def climb_to_last_misclassified_images(
    victims: Victims,
    steps: int,
    objective: Literal["cross_entropy", "dlr", "targeted_dlr"] = "cross_entropy",
    rank: int = 0,
    samples: int = 1,
) -> Tensor:
    """Return each image's last misclassified point in an APGD ascent; else its random start."""
    # rank: of the other class that targeted_dlr aims at; 0 is the most likely.
    # samples: passes whose gradients are averaged.
    labels = victims.labels
    aims = victims.others[:, rank]
    goals: dict[str, Goal] = {
        "cross_entropy": lambda output: cross_entropy(output.prediction, labels, reduction="none"),
        "dlr": lambda output: gradient.dlr_loss(output.prediction, labels),
        "targeted_dlr": lambda output: gradient.targeted_dlr_loss(output, labels, aims),
    }
    at = ModelGradient(victims.model, goals[objective], victims.ball, samples)
    start = base.random_start(victims.ball, victims.generators, "autoattack")
    start = victims.ball.restore_fixed_pixels(start)
    result = apgd_ascent(at, victims.ball, start, steps, lambda: at.prediction.argmax(1) != labels)
    at.check_finite()
    return result.wrong

"""APGD through a soft form of the routers, and the settings of all attacks on the routers."""

from copy import copy
from itertools import product
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from moecore.attacks.apgd import Apgd, apgd_ascent
from moecore.attacks.base import Attack, Ball, ImageGenerators, random_start
from moecore.attacks.gradient import NO_ROUTING_TEXT, GradientAttack, ModelGradient, ValueGradient
from moecore.core.config import Config
from moecore.nn.layers.lipschitz_lemma import soften_model
from moecore.tasks.base import Task

Positive = Annotated[float, Field(gt=0)]
Temperature = Positive | Literal["probs"]


class Surrogate(GradientAttack):
    """APGD on a copy of the model whose top-k choice is soft (as BPDA, Athalye et al. 2018).

    At low temperature the copy tends to the model. ``direct`` then runs APGD on the model itself,
    from the images found on the copy.
    """

    kind: Literal["surrogate"] = "surrogate"
    steps: int = Field(100, ge=1, description="Number of gradient steps.")
    temperature: Temperature = Field(0.1, description="Of gates, in logits; probs: all, by probs.")
    direct: bool = Field(False, description="Go on with APGD on the model itself, as many steps.")

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        if getattr(model, "moe", None) is None:
            return NO_ROUTING_TEXT
        return super().does_not_apply(model, task)

    def perturb_images(self, at: ValueGradient, ball: Ball, generator: ImageGenerators) -> Tensor:
        assert isinstance(at, ModelGradient)
        soft = copy(at)  # shares the list of checks that gradients are finite
        temperature = None if self.temperature == "probs" else self.temperature
        soft.model = soften_model(at.model, temperature)
        images = apgd_ascent(soft, ball, random_start(ball, generator), self.steps).images
        if self.direct:
            images = apgd_ascent(at, ball, images, self.steps).images
        return images


class RouterAttacks(Config):
    """Settings of several attacks with APGD that use the routers; all of them run.

    Per temperature, ``surrogate`` without and with ``direct``. Per weight, APGD on task loss +
    weight · routing margin (logit of a token's next expert − its k-th). Once, APGD on that margin.
    """

    steps: int = Field(50, ge=1, description="Steps of APGD in each form.")
    temperatures: tuple[Temperature, ...] = Field(
        (0.03, 0.3, 3.0, "probs"), description="Of a soft choice, as in the attack surrogate."
    )
    weights: tuple[Positive, ...] = Field((0.1, 1.0, 10.0), description="Margin against task loss.")
    inside: bool = Field(False, description="Change only pixels that are not 0.")

    @property
    def parts(self) -> tuple[Attack, ...]:
        """The attacks, each with its own name."""
        shared = {"steps": self.steps, "inside": self.inside}
        forms = product((False, True), self.temperatures)
        soft = [Surrogate(temperature=value, direct=direct, **shared) for direct, value in forms]
        joint = [Apgd(objective="task_and_routing", weight=each, **shared) for each in self.weights]
        return (*soft, *joint, Apgd(objective="routing_margin", **shared))

"""Balls of allowed images around the clean ones, in the L∞ or L2 norm, and attacks within them."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import Attack, ImageGenerators, normal_noise_like, uniform_noise_like
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import describe_refusal

Norm = Literal["linf", "l2"]
Radius = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TINY = 1e-12  # as in the authors' code, for a gradient or a noise that is all zeros


class Ball(NamedTuple):
    """The allowed images: in [0, 1], within ``epsilon`` of the clean images."""

    centre: Tensor  # (B, C, H, W), the clean images
    epsilon: float  # in pixel units; in L2 of all pixels of an image together
    norm: Norm = "linf"
    may_change: Tensor | None = None  # bool, (B, C, H, W); None: every pixel may change

    def project(self, images: Tensor) -> Tensor:
        """Return the nearest images inside the ball, (B, C, H, W)."""
        if self.norm == "linf":
            low, high = self.centre - self.epsilon, self.centre + self.epsilon
            return images.clamp(low, high).clamp(0, 1)
        # In two steps as in the authors' code: to the ball, then to [0, 1].
        change = images - self.centre
        length = spread(self.lengths(change).clamp(max=self.epsilon), change)
        return (self.centre + self.direction(change) * length).clamp(0, 1)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the step of length 1 that raises the objective most, (B, C, H, W)."""
        if self.norm == "linf":
            return gradient.sign()
        return gradient / (spread(self.lengths(gradient), gradient) + TINY)

    def lengths(self, changes: Tensor) -> Tensor:
        """Return the norm (B,) of changes (B, …)."""
        changes = changes.flatten(1)
        if self.norm == "linf":
            return changes.abs().amax(dim=1)
        return changes.square().sum(dim=1).sqrt()

    def confine(self, images: Tensor) -> Tensor:
        """Return the images with the clean value of all pixels that may not change."""
        if self.may_change is None:
            return images
        return torch.where(self.may_change, images, self.centre)

    def take(self, rows: slice | Tensor) -> "Ball":
        may_change = None
        if self.may_change is not None:
            may_change = self.may_change[rows]
        return self._replace(centre=self.centre[rows], may_change=may_change)


def spread(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per image (B,) in a shape that broadcasts over pixels (B, …)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def where_chosen(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` for the chosen images (B,), else ``old``."""
    return torch.where(spread(chosen, new), new, old)


def random_start(ball: Ball, generator: ImageGenerators, who: str = "apgd") -> Tensor:
    """Return clean images plus noise at distance ε, in [0, 1]: uniform for L∞, normal for L2."""
    if ball.norm == "linf":
        noise = uniform_noise_like(ball.centre, generator, who)
    else:
        noise = normal_noise_like(ball.centre, generator, who)
    length = spread(ball.lengths(noise), noise) + TINY
    return (ball.centre + ball.epsilon * noise / length).clamp(0, 1)


class BallAttack(Attack):
    """An attack within a ball of a norm; base of all attacks but those of other packages."""

    eps: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Own radius, in its norm; null: `epsilons`."
    )
    norm: Norm = Field("linf", description="Of the ball. A section's epsilons are L∞ radii.")

    def radii(self, epsilons: Iterable[float]) -> tuple[float, ...]:
        if self.eps is not None:
            return (self.eps,)
        return tuple(epsilons)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, reason) for an L2 ball without a radius, and a radius above the range."""
        if self.norm == "l2" and self.eps is None:
            allowed = "eps, the radius in L2, in addition; epsilons are radii in L∞"
            yield ("norm",), describe_refusal(found="l2 without eps", allowed=allowed)
        largest = math.inf
        if self.norm == "linf":
            largest = 1.0
        elif around.preview is not None:
            largest = self.largest_radius((around.preview.channels, *around.preview.shape))
        if self.eps is not None and self.eps > largest:
            allowed = f"above 0, at most {largest:.4g} ({self.norm})"
            yield ("eps",), describe_refusal(found=self.eps, allowed=allowed)
        yield from super().misfits(around)

    def largest_radius(self, shape: Iterable[int]) -> float:
        """Return the distance of a black and a white image of ``shape``."""
        if self.norm == "linf":
            return 1.0
        return math.sqrt(math.prod(shape))

    def clean_copy(self, images: Tensor, epsilon: float) -> Tensor:
        """Return the images as new fp32; ValueError if they or ε are out of range."""
        if not images.is_floating_point():
            raise ValueError(f"attack: images are {images.dtype}; floats in [0, 1] are needed")
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            limits = f"[{images.min():.4g}, {images.max():.4g}]"
            raise ValueError(f"attack: images are in {limits}; [0, 1] is needed")
        largest = self.largest_radius(images.shape[1:])
        if not 0 <= epsilon <= largest:  # also NaN
            needed = f"0 to {largest:.4g} ({self.norm})"
            raise ValueError(f"attack: epsilon is {epsilon}; {needed} is needed")
        return images.detach().to(torch.float32, copy=True)

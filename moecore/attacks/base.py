"""Base classes of attacks: balls of allowed images, in L∞ or L2, and random numbers of an image.

The random numbers do not depend on the image's batch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Misfits, Part, Surroundings
from moecore.core.files import format_found_and_allowed
from moecore.tasks.base import Task

Norm = Literal["linf", "l2"]
Radius = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TINY = 1e-12  # as in the authors' code, for a gradient or a noise that is all zeros


class Attack(Part, ABC):
    """Settings of an attack on images; call them to attack a batch. Base of all attacks."""

    @property
    def name(self) -> str:
        """The kind and the values of settings that are not default: pgd, pgd-10, pgd-inside-10."""
        changed = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        # A switch is shown by its key: "inside" says more than "True".
        texts = [key if value is True else str(value) for key, value in changed.items()]
        return "-".join([self.kind, *texts])

    @property
    def together(self) -> int | None:
        """Number of images to attack at once, if the attack couples them; None: any number."""
        return None

    @property
    def climbs_task(self) -> bool:
        """True if the attack maximises the task's own loss."""
        return False

    @property
    def packs(self) -> bool:
        """True if one call takes all images and forms batches of those not yet misclassified."""
        return False

    def radii(self, epsilons: Iterable[float]) -> tuple[float, ...]:
        """Return the radii of the balls to attack: ``epsilons``, or the attack's own."""
        return tuple(epsilons)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (settings key, reason) if the attack cannot be used with the task's labels."""
        if around.source is not None and (reason := self.refuses(around.task)):
            yield ("kind",), f"found {self.kind}: {reason}; allowed: another attack"

    def refuses(self, task: Task | type[Task]) -> str | None:
        """Return why these settings cannot be used with a task, in words; None if they can."""
        return None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        """Return why the attack is impossible for this model and task, in words, or None."""
        return self.refuses(task)

    @abstractmethod
    def __call__(
        self,
        model: nn.Module,
        task: Task,
        images: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: "Generators" = None,
    ) -> Tensor:
        """Return adversarial images (B, C, H, W), fp32, detached, in [0, 1]; unchanged for ε = 0.

        Parameters take no gradient during the attack.

        Args:
            model: returns a ``ModelOutput`` for images.
            task: whose loss and labels are used.
            images: (B, C, H, W) in [0, 1].
            labels: (B, …), in the form of ``task``.
            epsilon: radius of the ball, in pixel units and the attack's norm (L∞ without one).
            generator: on the CPU, one for all images or one per image; draws the random start.

        Raises:
            ValueError: for invalid images, labels, ε or generator.
        """


ImageGenerators = Sequence[torch.Generator] | None  # one per image
Generators = torch.Generator | ImageGenerators  # or one for all images, in their order


def seed_generator_per_image(seed: int, indices: Iterable[int]) -> list[torch.Generator]:
    """Return one CPU generator per image, a function of the seed and the image's index only."""
    sequences = (np.random.SeedSequence((seed, index)) for index in indices)
    states = (sequence.generate_state(1, np.uint64)[0] for sequence in sequences)
    # torch takes seeds below 2⁶³ only.
    return [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]


def expand_generator_to_images(generator: Generators, images: int) -> ImageGenerators:
    if generator is None:
        return None
    each = [generator] * images if isinstance(generator, torch.Generator) else list(generator)
    if len(each) != images:
        raise ValueError(f"attack: {len(each)} generators for {images} images")
    return each


def uniform_noise_like(images: Tensor, generator: ImageGenerators, who: str) -> Tensor:
    """Draw uniform noise in [-1, 1) of the shape of ``images`` (B, C, H, W), image by image."""
    return 2 * _draw_like(images, generator, who, torch.rand) - 1


def normal_noise_like(images: Tensor, generator: ImageGenerators, who: str) -> Tensor:
    """Draw standard normal noise of the shape of ``images`` (B, C, H, W), image by image."""
    return _draw_like(images, generator, who, torch.randn)


def _draw_like(
    images: Tensor, generator: ImageGenerators, who: str, draw: Callable[..., Tensor]
) -> Tensor:
    # who: name of the attack, for the message.
    if generator is None:
        raise ValueError(f"attack: {who} draws a random start; pass a CPU generator")
    if not len(images):
        return torch.zeros_like(images)
    pairs = zip(images, generator, strict=True)
    noise = torch.stack([draw(image.shape, generator=each) for image, each in pairs])
    return noise.to(images.device)


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
        length = unsqueeze_like(self.lengths(change).clamp(max=self.epsilon), change)
        return (self.centre + self.direction(change) * length).clamp(0, 1)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the step of length 1 that raises the objective most, (B, C, H, W)."""
        if self.norm == "linf":
            return gradient.sign()
        return gradient / (unsqueeze_like(self.lengths(gradient), gradient) + TINY)

    def lengths(self, changes: Tensor) -> Tensor:
        """Return the norm (B,) of changes (B, …)."""
        changes = changes.flatten(1)
        if self.norm == "linf":
            return changes.abs().amax(dim=1)
        return changes.square().sum(dim=1).sqrt()

    def restore_fixed_pixels(self, images: Tensor) -> Tensor:
        """Return the images with the clean value of all pixels that may not change."""
        if self.may_change is None:
            return images
        return torch.where(self.may_change, images, self.centre)

    def take(self, rows: slice | Tensor) -> "Ball":
        may_change = None
        if self.may_change is not None:
            may_change = self.may_change[rows]
        return self._replace(centre=self.centre[rows], may_change=may_change)


def unsqueeze_like(values: Tensor, like: Tensor) -> Tensor:
    """Return values (B,), one per image, in a shape that broadcasts to ``like`` (B, …)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def pick_per_image(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` (B, …) for images whose ``chosen`` (B,) is true, else ``old`` (B, …)."""
    return torch.where(unsqueeze_like(chosen, new), new, old)


def random_start(ball: Ball, generator: ImageGenerators, who: str = "apgd") -> Tensor:
    """Return clean images plus uniform (L∞) or normal (L2) noise, scaled to norm ε; in [0, 1]."""
    if ball.norm == "linf":
        noise = uniform_noise_like(ball.centre, generator, who)
    else:
        noise = normal_noise_like(ball.centre, generator, who)
    length = unsqueeze_like(ball.lengths(noise), noise) + TINY
    return (ball.centre + ball.epsilon * noise / length).clamp(0, 1)


class BallAttack(Attack):
    """An attack within a ball of a norm; base of all attacks except those of other packages."""

    eps: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Own radius, in its norm; null: `epsilons`."
    )
    norm: Norm = Field("linf", description="Of the ball. A section's epsilons are L∞ radii.")

    def radii(self, epsilons: Iterable[float]) -> tuple[float, ...]:
        if self.eps is not None:
            return (self.eps,)
        return tuple(epsilons)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, reason) for L2 without ``eps``, or ``eps`` above ``largest_radius``."""
        if self.norm == "l2" and self.eps is None:
            allowed = "eps, the radius in L2, in addition; epsilons are radii in L∞"
            yield ("norm",), format_found_and_allowed(found="l2 without eps", allowed=allowed)
        largest = math.inf
        if self.norm == "linf":
            largest = 1.0
        elif around.preview is not None:
            largest = self.largest_radius((around.preview.channels, *around.preview.shape))
        if self.eps is not None and self.eps > largest:
            allowed = f"above 0, at most {largest:.4g} ({self.norm})"
            yield ("eps",), format_found_and_allowed(found=self.eps, allowed=allowed)
        yield from super().misfits(around)

    def largest_radius(self, shape: Iterable[int]) -> float:
        """Return the distance of a black and a white image of ``shape``."""
        if self.norm == "linf":
            return 1.0
        return math.sqrt(math.prod(shape))

    def check_and_copy_images(self, images: Tensor, epsilon: float) -> Tensor:
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

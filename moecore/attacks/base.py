"""Base class of attacks, and random numbers of an image that do not depend on its batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from moecore.core.config import Misfits, Part, Surroundings
from moecore.tasks.base import Task


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
        """True if the attack takes all images in one call, with ``batch``, and packs survivors."""
        return False

    def radii(self, epsilons: Iterable[float]) -> tuple[float, ...]:
        """Return the radii of the balls to attack: ``epsilons``, or the attack's own."""
        return tuple(epsilons)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, reason) if the attack cannot be used with the task's labels."""
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


def image_generators(seed: int, indices: Iterable[int]) -> list[torch.Generator]:
    """Return one CPU generator per image, a function of the seed and the image's index only."""
    sequences = (np.random.SeedSequence((seed, index)) for index in indices)
    states = (sequence.generate_state(1, np.uint64)[0] for sequence in sequences)
    # torch takes seeds below 2⁶³ only.
    return [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]


def one_generator_per_image(generator: Generators, images: int) -> ImageGenerators:
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

"""What every attack says of itself; an image's random numbers never depend on its batch.

B images, C channels, H × W pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from moecore.core.config import Part
from moecore.core.surroundings import Misfits, Surroundings
from moecore.tasks.base import Task


class Attack(Part, ABC):
    """The settings of an attack on images, a family of parts; they are called to attack."""

    @property
    def name(self) -> str:
        """The kind and whatever differs from its defaults: pgd, pgd-10, pgd-inside-10."""
        changed = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        # A switch that is on is called by its key: "inside" says more than "True".
        words = [key if value is True else str(value) for key, value in changed.items()]
        return "-".join([self.kind, *words])

    @property
    def together(self) -> int | None:
        """Return how many images it must get at once, as they matter to each other; None: any."""
        return None

    @property
    def climbs_task(self) -> bool:
        """Return whether it climbs the task's own loss, as others do that it is compared with."""
        return False

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield why it makes no sense for the labels."""
        if around.source is not None and (reason := self.refuses(around.task)):
            yield ("kind",), f"found {self.kind}: {reason}; allowed: another attack"

    def refuses(self, task: Task | type[Task]) -> str | None:
        """Return why these settings make no sense for a task, in words; None where they do."""
        return None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        """Return why there is nothing to attack in this model, in words; None where there is."""
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
        """Adversarial images (B, C, H, W), fp32, detached, in [0, 1]; for ε = 0 the same bits.

        images: (B, C, H, W) in [0, 1]; labels: as ``task`` has them; epsilon: radius of the L∞
        ball, in pixel units; generator: on the CPU, one for all images or one each, draws the
        random start of attacks that have one. Parameters take no gradient meanwhile. Raises
        ValueError where images, labels, ε or generator make no sense.
        """


ImageGenerators = Sequence[torch.Generator] | None  # one for each image
Generators = torch.Generator | ImageGenerators  # or one for all images in their order


def image_generators(seed: int, indices: Iterable[int]) -> list[torch.Generator]:
    """One generator on the CPU per image, by the seed and the image's index alone."""
    states = (
        np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] for index in indices
    )
    # torch takes seeds below 2⁶³ only.
    return [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]


def expand_generators(generator: Generators, images: int) -> ImageGenerators:
    """The generator of each image; None where there is none."""
    if generator is None:
        return None
    each = [generator] * images if isinstance(generator, torch.Generator) else list(generator)
    if len(each) != images:
        raise ValueError(f"attack: {len(each)} generators for {images} images")
    return each


def uniform_noise_like(images: Tensor, generator: ImageGenerators, who: str) -> Tensor:
    """Uniform noise in [-1, 1) like ``images`` (B, C, H, W), drawn image by image.

    Raises ValueError without a generator.
    """
    if generator is None:
        raise ValueError(f"attack: {who} draws a random start; pass a CPU generator")
    if not len(images):
        return torch.zeros_like(images)
    noise = [
        torch.rand(image.shape, generator=each)
        for image, each in zip(images, generator, strict=True)
    ]
    return (2 * torch.stack(noise) - 1).to(images.device)

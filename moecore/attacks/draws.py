"""Random numbers of an attack: those of an image never depend on the other images of its batch.

B images, C channels, H × W pixels.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

# One for all images in their order, or one for each.
Generators = torch.Generator | Sequence[torch.Generator] | None


def generators(seed: int, indices: Iterable[int]) -> list[torch.Generator]:
    """One generator on the CPU per image, by the seed and the image's index.

    The same whichever other images are attacked.
    """
    states = (
        np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] for index in indices
    )
    # torch takes seeds below 2⁶³ only.
    return [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]


def one_each(generator: Generators, images: int) -> list[torch.Generator] | None:
    """The generator of each image; None where there is none."""
    if generator is None:
        return None
    each = [generator] * images if isinstance(generator, torch.Generator) else list(generator)
    if len(each) != images:
        raise ValueError(f"attack: {len(each)} generators for {images} images")
    return each


def uniform(images: Tensor, generator: Sequence[torch.Generator] | None, who: str) -> Tensor:
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

"""Random numbers behind noise: functions of whole numbers and a name, never of a batch."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from moecore.core.streams import generator_for

SIGMAS = (0.05, 0.1, 0.2)  # of Gaussian noise on pixels in [0, 1], where nothing else is said


def image_rng(seed: int, name: str, severity: int, index: int) -> np.random.Generator:
    """The generator of one corrupted image; ``index`` is the image's place in its split.

    Any other argument gives independent numbers.
    """
    digest = hashlib.sha256(f"{seed},{name},{severity},{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def standard_normal_noise(indices: np.ndarray, shape: tuple[int, ...], seed: int) -> Tensor:
    """One standard normal draw an image, fp32 (N, *shape), a function of (seed, image's index).

    Times sigma it is Gaussian noise; the same direction serves every sigma, model and method.
    """
    made = torch.empty(len(indices), *shape)
    for row, index in zip(made, indices, strict=True):
        row.normal_(generator=generator_for(seed, *b"noise", int(index)))
    return made


def add_noise(images: np.ndarray, directions: Tensor, sigma: float) -> Tensor:
    """clamp(image + sigma · direction, 0, 1), fp32, of uint8 images (N, C, H, W)."""
    pixels = torch.from_numpy(np.array(images)).float() / 255
    return (pixels + sigma * directions).clamp_(0, 1)

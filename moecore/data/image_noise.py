"""Random numbers of image noise: functions of integers and a name, never of the batch."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from moecore.core.streams import generator_for

SIGMAS = (0.05, 0.1, 0.2)  # default levels of Gaussian noise on pixels in [0, 1]


def image_rng(seed: int, name: str, severity: int, index: int) -> np.random.Generator:
    """Return the generator of one corrupted image; ``index`` is its position in its split."""
    digest = hashlib.sha256(f"{seed},{name},{severity},{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def standard_normal_noise(indices: np.ndarray, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw one standard normal array per image, fp32 (N, *shape), by seed and image index."""
    noise = torch.empty(len(indices), *shape)
    for row, index in zip(noise, indices, strict=True):
        row.normal_(generator=generator_for(seed, *b"noise", int(index)))
    return noise


def add_noise(images: np.ndarray, directions: Tensor, sigma: float) -> Tensor:
    """Return clamp(image + sigma · direction, 0, 1), fp32, of uint8 images (N, C, H, W)."""
    pixels = torch.from_numpy(np.array(images)).float() / 255
    return (pixels + sigma * directions).clamp_(0, 1)

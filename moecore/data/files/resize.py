"""Resizing whole sets of small images."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

CHUNK = 4096


def resized(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield chunks uint8 (n, C, size, size) of images uint8 (N, C, H, W): bilinear, with
    antialiasing where it shrinks.
    """
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        if chunk.shape[-2:] == (size, size):
            # the same bytes: interpolating to the own size could round
            yield np.ascontiguousarray(chunk)
        else:
            yield _bilinear(chunk, size)


def _bilinear(images: np.ndarray, size: int) -> np.ndarray:
    pixels = torch.from_numpy(np.ascontiguousarray(images)).to(torch.float32)
    shrunk = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
    return shrunk.round_().clamp_(0, 255).to(torch.uint8).numpy()

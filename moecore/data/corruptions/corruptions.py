"""Fifteen seeded corruptions, as common corruptions (Hendrycks & Dietterich, 2019, section 4).

They are our own renderings for any image of at least 8 × 8 pixels and any number of channels, not
the benchmark's files, and their errors do not compare with published ones. Noise, blur, contrast,
brightness, pixels and JPEG follow its recipes; frost, fog, snow and the elastic transform are made
procedurally. The strength follows the image's size (see scale.py).
"""

from collections.abc import Callable

import numpy as np

from moecore.core.files import UserError
from moecore.data.corruptions import (
    brightness,
    contrast,
    defocus_blur,
    elastic_transform,
    fog,
    frost,
    gaussian_noise,
    glass_blur,
    impulse_noise,
    jpeg_compression,
    motion_blur,
    pixelate,
    shot_noise,
    snow,
    to_uint8,
    zoom_blur,
)
from moecore.data.image_noise import image_rng

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
ALL: tuple[Corruption, ...] = (
    gaussian_noise,
    shot_noise,
    impulse_noise,
    defocus_blur,
    glass_blur,
    motion_blur,
    zoom_blur,
    snow,
    frost,
    fog,
    brightness,
    contrast,
    elastic_transform,
    pixelate,
    jpeg_compression,
)
CORRUPTIONS: dict[str, Corruption] = {corruption.__name__: corruption for corruption in ALL}
LEAST = 8  # pixels of the shorter side: below, no blur or block is left to speak of


def corrupt_images(
    images: np.ndarray, name: str, severity: int, seed: int, indices: np.ndarray
) -> np.ndarray:
    """The images under one corruption: uint8 (N, C, H, W) in and out, rounded, cut to [0, 255].

    name: a key of CORRUPTIONS; severity: 1 to 5; indices: (N,) the images' places in their split.
    The bytes of an image are a function of its own bytes and (seed, name, severity, index): not of
    the batch, of its order, or of the global random state.
    Raises UserError for images smaller than 8 × 8.
    """
    if min(images.shape[-2:]) < LEAST:
        height, width = images.shape[-2:]
        allowed = f"{LEAST} × {LEAST} and larger"
        raise UserError(f"corruptions: images are {height} × {width} pixels; allowed: {allowed}")
    made = np.empty_like(images, subok=False)
    # one by one: sums over pixels round as they do alone
    for place, (image, index) in enumerate(zip(images, indices, strict=True)):
        random = image_rng(seed, name, severity, int(index))
        made[place] = to_uint8(CORRUPTIONS[name](np.asarray(image) / 255, severity, random))
    return made

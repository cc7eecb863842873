"""Corruptions by weather, all procedural: no picture of ice or snow is needed.

Image fp64 (C, H, W) in [0, 1], severity 1 to 5.
"""

import numpy as np

from moecore.data.corruptions import (
    apply_kernel,
    cloud_field,
    sample_bilinear,
    severity_length,
    severity_parameter,
    trail_kernel,
)
from moecore.data.views.augmentations import LUMA


def snow(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """A whitened image under falling flakes.

    Flakes are the peaks of a smoothed random field, drawn out along a direction between 45° and
    135° (90° is down), and the same turned by half a turn. Parameters: the field's mean (more
    flakes), their size and trail in pixels, and how much of the image stays as it is.
    """
    flake = severity_length(image, severity, (1.5, 1.5, 1.5, 1.5, 1.5), (3, 3, 3, 3, 3))
    mean = severity_parameter(
        image, severity, (0.1, 0.15, 0.2, 0.25, 0.3), (0.15, 0.25, 0.35, 0.45, 0.55)
    )
    kept = severity_parameter(
        image, severity, (0.95, 0.92, 0.88, 0.84, 0.8), (0.8, 0.75, 0.7, 0.65, 0.55)
    )
    layer = _flakes(image.shape[-2:], mean, flake, random)
    drawn = trail_kernel(
        severity_length(image, severity, (1, 1.2, 1.4, 1.6, 1.8), (4, 5, 6, 8, 10)),
        random.uniform(45, 135),
    )
    layer = apply_kernel(layer, drawn)
    whitened = kept * image + (1 - kept) * np.maximum(image, 1.5 * grey_image(image) + 0.5)
    return whitened + layer + layer[:, ::-1, ::-1]


def frost(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """A weighted sum of the image and of ice.

    Our ice is a random field of bright ridges; the benchmark lays photographs of ice over it.
    """
    kept = severity_parameter(image, severity, (1, 0.95, 0.9, 0.85, 0.75), (1, 0.8, 0.7, 0.65, 0.6))
    laid = severity_parameter(
        image, severity, (0.2, 0.28, 0.36, 0.42, 0.5), (0.4, 0.55, 0.65, 0.72, 0.8)
    )
    return kept * image + laid * ice_texture(image.shape[-2:], random)


def fog(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """A random cloud is added, then all is scaled back to the largest value: black stays black.

    Parameters: the thickness, and how smooth the cloud is. Our cloud is a sum of smooth noises, the
    benchmark's a diamond-square fractal.
    """
    thick = severity_parameter(image, severity, (0.2, 0.5, 0.75, 1, 1.5), (1.5, 2, 2.5, 2.8, 3.2))
    roughness = severity_parameter(image, severity, (3, 3, 2.5, 2, 1.75), (2, 2, 1.7, 1.5, 1.4))
    largest = image.max()
    return (image + thick * cloud_field(image.shape[-2:], roughness, random)) * (
        largest / (largest + thick)
    )


def brightness(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """The parameter is added to HSV's value, the largest channel; hue and saturation stay.

    One rule for any number of channels: every channel is multiplied by new value / old value.
    """
    added = severity_parameter(
        image, severity, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)
    )
    value = image.max(axis=0, keepdims=True)
    brighter = np.minimum(value + added, 1)
    return np.where(value > 0, image * brighter / np.where(value > 0, value, 1), brighter)


def grey_image(image: np.ndarray) -> np.ndarray:
    """(1, H, W): the luma of three channels, else the mean of the channels."""
    if len(image) == 3:
        return np.tensordot(np.array(LUMA), image, 1)[None]
    return image.mean(axis=0, keepdims=True)


def ice_texture(size: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """A texture (1, H, W) in [0, 1]: thin bright ridges over a dim cloudy ground."""
    field = cloud_field(size, 1.8, random, cells=3)
    ridges = (1 - np.abs(2 * field - 1)) ** 3
    return (0.7 * ridges + 0.3 * cloud_field(size, 1.5, random, cells=2))[None]


def _flakes(
    size: tuple[int, int], mean: float, flake: float, random: np.random.Generator
) -> np.ndarray:
    """Peaks (1, H, W), 0 below 0.5, of a normal field (σ 0.3), its values ``flake`` apart."""
    coarse = random.normal(mean, 0.3, (1, *(int(np.ceil(number / flake)) + 1 for number in size)))
    field = sample_bilinear(coarse, *(np.arange(number) / flake for number in size))
    return np.where(field < 0.5, 0.0, np.clip(field, 0, 1))

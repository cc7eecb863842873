"""Corruptions by noise. Image fp64 (C, H, W) in [0, 1], severity 1 to 5."""

import numpy as np

from moecore.data.corruptions import severity_parameter


def gaussian_noise(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Normal noise in every value; the parameter is its standard deviation."""
    sigma = severity_parameter(
        image, severity, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)
    )
    return image + sigma * random.standard_normal(image.shape)


def shot_noise(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Poisson counts of the light; the parameter is the expected count of a white pixel."""
    photons = severity_parameter(image, severity, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3))
    return random.poisson(image * photons) / photons


def impulse_noise(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Salt and pepper: the parameter is the share of values that become 0 or 1."""
    amount = severity_parameter(
        image, severity, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)
    )
    drawn = random.random(image.shape)
    return np.where(drawn < amount / 2, 0.0, np.where(drawn < amount, 1.0, image))

"""A simulated scan: site's brightness and contrast, smooth shading, Rician noise inside the head;
zero outside it (skull-stripped).
"""

import numpy as np

from moecore.data.phantom.fields import smooth_fields
from moecore.data.phantom.numbers import BIAS, SCAN_LOG_SD, SITE_GAIN, SITE_GAMMA_LOG_SD, SITE_NOISE


def scanned(
    brightness: np.ndarray, mask: np.ndarray, seed: int, scan: int, site: int
) -> np.ndarray:
    """One scan of a brain: float32 (D, H, W), positive inside ``mask`` and exactly 0 outside.

    seed and scan: the person's and which of his scans; site: which scanner. The random streams do
    not touch that of the anatomy.
    """
    random = np.random.default_rng([seed, 2, scan])
    scanner = np.random.default_rng([site, 77])
    gain = scanner.uniform(*SITE_GAIN)
    gamma = float(np.exp(scanner.normal(0, SITE_GAMMA_LOG_SD)))
    noise = scanner.uniform(*SITE_NOISE) * gain
    shading = np.exp(BIAS * smooth_fields(random)[0] + random.normal(0, SCAN_LOG_SD))
    inside = np.flatnonzero(mask)
    real, imaginary = random.standard_normal((2, len(inside)), dtype=np.float32) * np.float32(noise)
    signal = (np.clip(brightness, 0, None) ** gamma * shading * gain).ravel()[inside]
    image = np.zeros(brightness.size, np.float32)
    image[inside] = np.hypot(signal + real, imaginary)
    return image.reshape(brightness.shape)

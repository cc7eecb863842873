"""The grid that every volume is brought to: resampling, cropping and padding."""

from typing import Self

import numpy as np
from pydantic import Field, model_validator
from scipy import ndimage

from moecore.core.config import Config

TILE = 16  # voxels: cubes of this side tile every stored volume
BRAIN = 0.5  # share of tissue from which on a voxel is inside the brain
FWHM_TO_SD = 2 * np.sqrt(2 * np.log(2))
SAME_MM = 1e-3  # voxel sizes that differ less are the same


class Grid(Config):
    """The voxels that every volume is brought to; axes run right, anterior, superior (RAS)."""

    voxel_mm: float = Field(
        3.0, gt=0, le=20, description="Side of a voxel in mm; volumes are resampled to it"
    )
    size: tuple[int, int, int] = Field(
        (64, 64, 64), description="Right, anterior, superior, in voxels; multiples of 16"
    )

    @model_validator(mode="after")
    def _tiled(self) -> Self:
        if any(length <= 0 or length % TILE for length in self.size):
            allowed = f"multiples of {TILE}, so that cubes of {TILE}³ tile the volume"
            raise ValueError(f"size is {list(self.size)}; allowed: {allowed}")
        return self


def resample_volume(volume: np.ndarray, zooms: tuple[float, ...], voxel_mm: float) -> np.ndarray:
    """A volume resampled from ``zooms`` to ``voxel_mm``: linear, smoothed before shrinking; fp32.

    Both grids have the same centre. A volume that has that voxel size already is returned as it is.
    """
    factors = voxel_mm / np.asarray(zooms, np.float64)  # old voxels per new one
    if np.all(np.abs(factors - 1) * voxel_mm < SAME_MM):
        return volume.astype(np.float32, copy=False)
    # a voxel's own width counts as a FWHM of 1
    smoothing = np.sqrt(np.maximum(factors**2 - 1, 0)) / FWHM_TO_SD
    smooth = ndimage.gaussian_filter(volume.astype(np.float32), smoothing, mode="constant")
    shape = tuple(int(length) for length in np.ceil(np.array(volume.shape) / factors - 1e-6))
    offset = (np.array(volume.shape) - 1) / 2 - factors * (np.array(shape) - 1) / 2
    return ndimage.affine_transform(
        smooth, factors, offset, shape, order=1, mode="constant", output=np.float32
    )


def resample_masked_volume(
    volume: np.ndarray, mask: np.ndarray, zooms: tuple[float, ...], voxel_mm: float
) -> tuple[np.ndarray, np.ndarray]:
    """Like ``resample_volume`` of the mask's inside; values, and the new mask, bool."""
    weight = resample_volume(mask.astype(np.float32), zooms, voxel_mm)
    values = resample_volume(np.where(mask, volume, 0), zooms, voxel_mm)
    inside = weight >= BRAIN
    return np.where(inside, values / np.maximum(weight, BRAIN), 0).astype(np.float32), inside


def brain_window_start(mask: np.ndarray, size: tuple[int, int, int]) -> tuple[int, ...]:
    """First index per axis of ``size`` voxels around the mask's middle (negative: padding).

    Zeros for a volume that has this size already: then nothing moves.
    """
    if mask.shape == tuple(size):
        return (0, 0, 0)
    bounds = [np.flatnonzero(mask.any(axis=axes))[[0, -1]] for axes in ((1, 2), (0, 2), (0, 1))]
    return tuple(
        int(low + high + 1) // 2 - length // 2
        for (low, high), length in zip(bounds, size, strict=True)
    )


def cut_window(
    volume: np.ndarray, start: tuple[int, ...], size: tuple[int, int, int]
) -> np.ndarray:
    """``size`` voxels of a volume (D, H, W) from ``start``; zeros where there is none."""
    axes = list(zip(start, size, volume.shape, strict=True))
    padded = np.pad(volume, [(max(-at, 0), max(at + n - length, 0)) for at, n, length in axes])
    return padded[tuple(slice(max(at, 0), max(at, 0) + n) for at, n, _ in axes)]

"""Make the phantom's template from the MNI152 maps that nilearn carries:
``python tools/build_template.py FILE.npz``.

Needs nilearn (0.14.1 made the shipped file). Writes 64³ maps of 3 mm as uint8 (share × 255) and the
distance to the lateral ventricles as float16, and prints the digest that
moecore/data/phantom/anatomy.py has to name.
"""

import sys
from pathlib import Path

import numpy as np
from scipy import ndimage

from moecore.core.files import file_checksum

CENTRE = np.array([98, 134, 72])  # the voxel of nilearn's 1 mm maps at 0, 0, 0 mm
SEEDS = ((-8, 0, 18), (8, 0, 18))  # mm: a point inside each lateral ventricle
# mm: lateral ventricles lie at least so far inside the brain mask; this cuts them off the fluid
# around the brain
DEEP = 12
# 192 mm along each axis, averaged over 3³ voxels
WIDE = 192
SHRINK = 3


def build() -> dict[str, np.ndarray]:
    """Return name → array of the template."""
    brightness, grey, white, mask = _maps()
    total = np.maximum(grey + white, 1)
    grey = grey / total * mask
    white = white / total * mask
    fluid = np.clip(mask - grey - white, 0, 1)
    ventricles = _ventricles(fluid, mask)
    outside = ndimage.distance_transform_edt(~ventricles)
    distance = ndimage.gaussian_filter(
        (outside - ndimage.distance_transform_edt(ventricles)).astype(np.float32), 1.0
    )
    # the ventricles and their rim are filled with the nearest tissue, so that a smaller one can be
    # drawn too
    nearest = ndimage.distance_transform_edt(
        (outside <= 3) & (fluid > 0.15), return_distances=False, return_indices=True
    )
    start = [round((int(low) + int(high) + 1) / 2) - WIDE // 2 for low, high in _bounds(mask > 0)]
    maps = {"brightness": brightness, "grey": grey, "white": white, "fluid": fluid}
    small = {
        name: _shrunk(values[tuple(nearest)] * mask, start, 0) for name, values in maps.items()
    }
    return {name: np.rint(values * 255).astype(np.uint8) for name, values in small.items()} | {
        "distance": _shrunk(distance, start, 90).astype(np.float16),
        "origin_mm": (np.array(start) + 1 - CENTRE).astype(np.float32),
    }


def _maps() -> list[np.ndarray]:
    from nilearn import datasets

    loaders = (
        datasets.load_mni152_template,
        datasets.load_mni152_gm_template,
        datasets.load_mni152_wm_template,
    )
    mask = datasets.load_mni152_brain_mask(resolution=1).get_fdata(dtype=np.float32) > 0
    return [
        *(load(resolution=1).get_fdata(dtype=np.float32) for load in loaders),
        mask.astype(np.float32),
    ]


def _ventricles(fluid: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the mask of the lateral ventricles: connected deep fluid that has both seeds."""
    labels, _ = ndimage.label((fluid > 0.5) & (ndimage.distance_transform_edt(mask > 0) > DEEP))
    found = {int(labels[tuple(np.array(seed) + CENTRE)]) for seed in SEEDS}
    if len(found) != 1 or 0 in found:
        raise SystemExit(
            f"found no lateral ventricles at {SEEDS} mm: are these nilearn's MNI152 maps at 1 mm?"
        )
    return labels == found.pop()


def _bounds(mask: np.ndarray) -> list[np.ndarray]:
    """Return the first and last index of the mask along each axis."""
    others = ((1, 2), (0, 2), (0, 1))
    return [np.flatnonzero(mask.any(axis=axes))[[0, -1]] for axes in others]


def _shrunk(values: np.ndarray, start: list[int], fill: float) -> np.ndarray:
    """Cut 192³ voxels from ``start`` (outside: ``fill``) and average over 3³."""
    wide = np.full((WIDE,) * 3, fill, np.float32)
    source = [
        slice(max(first, 0), min(first + WIDE, length))
        for first, length in zip(start, values.shape, strict=True)
    ]
    target = [
        slice(part.start - first, part.stop - first)
        for part, first in zip(source, start, strict=True)
    ]
    wide[tuple(target)] = values[tuple(source)]
    return wide.reshape((WIDE // SHRINK, SHRINK) * 3).mean((1, 3, 5))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    np.savez_compressed(target, **build())
    print(f"{target}: {target.stat().st_size} bytes, sha256 {file_checksum(target)}")

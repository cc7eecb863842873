"""Another generator of phantoms: a head of ellipsoids in place of the MNI152 anatomy, with another
contrast and other scanners. For tests of what a model learned from the first; nothing trains on it.

It ages as the first does (anatomy.py), so that its tissue has the same trajectories. Every number
here is a choice of this simulation; lengths in mm, from the middle of the head.
"""

from functools import cache

import numpy as np

from moecore.data.layouts.volumes import BRAIN
from moecore.data.phantom import anatomy
from moecore.data.phantom.simulated_person import LifelongTraits
from moecore.data.thread_map import one_blas_thread
from moecore.data.volumes.volume_preparation import (
    VolumeWithTissueShares,
    pack_stored_volume,
)

# Semi-axes along right, anterior, superior
HEAD = (72.0, 88.0, 76.0)
VENTRICLE = (6.0, 30.0, 10.5)
NUCLEUS = (11.0, 20.0, 12.0)
# Where they lie, left and right alike
VENTRICLE_AT = (14.0, -4.0, 4.0)
NUCLEUS_AT = (30.0, 0.0, -12.0)
# Depths below the skull at which grey and white matter begin, and how far folds move them
GREY_DEPTH = 3.5
GREY_FOLD = 2.0
WHITE_DEPTH = 17.0
WHITE_FOLD = 7.0
FOLD_MM = 34.0  # from one gyrus to the next

# Brightness is raised to this power before the scan: grey matter lies at 0.44 of the way from fluid
# to white matter, and at 0.61 in the first generator, whose scanners vary it by 0.06 (SD of log).
CONTRAST = 2.5
FIRST_SITE = 1000  # scanners from here on, which no cohort has
SITES = 8
_STREAM = 5  # of the seed; the first generator's streams have 1 to 3


def simulate_shell_scan(age: float, sex: str, seed: int) -> VolumeWithTissueShares:
    """A scan of person ``seed`` at an age in years, as a woman (F) or a man (M).

    As ``prepare`` stores the first generator's: image float16 (1, D, H, W) in [0, 1], regions uint8
    (3, D, H, W) of wm, gm, csf, share × 255. A function of its arguments alone.
    """
    site = FIRST_SITE + int(np.random.default_rng([seed, _STREAM]).integers(SITES))
    with one_blas_thread():
        brain = LifelongTraits.draw(seed, "realistic").at(age, sex, base=folded_brain_template())
        mask = brain.regions.sum(axis=0) > BRAIN
        brightness = np.clip(brain.brightness, 0, None) ** CONTRAST
        return pack_stored_volume(
            anatomy.scan_brain(brightness, mask, seed, 0, site), brain.regions, mask
        )


@cache
def folded_brain_template() -> anatomy.Template:
    """The anatomy: a folded ribbon of grey matter around white, two ventricles, two nuclei."""
    middle = (anatomy.SIDE - 1) / 2
    points = ((anatomy.grid_points() - np.float32(middle)) * np.float32(anatomy.VOXEL_MM)).reshape(
        3, *(anatomy.SIDE,) * 3
    )
    depth = -ellipsoid_distance(points, HEAD)
    folds = np.sin(points * np.float32(2 * np.pi / FOLD_MM)).sum(axis=0) / 3
    head = anatomy.ventricle_voxel_shares(0.0, -depth)
    brain = anatomy.ventricle_voxel_shares(0.0, GREY_DEPTH + GREY_FOLD * folds - depth)
    core = anatomy.ventricle_voxel_shares(0.0, WHITE_DEPTH + WHITE_FOLD * folds - depth)
    sides = np.abs(points[:1])  # left and right alike
    half = np.concatenate([sides, points[1:]])
    nucleus = anatomy.ventricle_voxel_shares(0.0, ellipsoid_distance(half, NUCLEUS, NUCLEUS_AT))
    white = core * (1 - nucleus)
    grey = brain - white
    fluid = head - brain
    brightness = anatomy.FLUID * fluid + anatomy.GREY * grey + anatomy.WHITE * white
    distance = ellipsoid_distance(half, VENTRICLE, VENTRICLE_AT)
    maps = np.stack([brightness, grey, white, fluid, distance]).astype(np.float32)
    return anatomy.template_from_maps(*maps, origin=np.full(3, -middle * anatomy.VOXEL_MM))


def ellipsoid_distance(
    points: np.ndarray, axes: tuple[float, ...], at: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> np.ndarray:
    """Distance in mm to an ellipsoid's surface, negative inside, to first order near the surface.

    points: (3, …) mm; axes: its semi-axes; at: its middle.
    """
    shape = (3, *(1,) * (points.ndim - 1))
    moved = points - np.reshape(at, shape)
    size = np.reshape(axes, shape)
    near = np.sqrt(((moved / size) ** 2).sum(axis=0))
    slope = np.sqrt(((moved / size**2) ** 2).sum(axis=0))
    distance = near * (near - 1) / np.maximum(slope, 1e-6)
    return np.where(slope > 1e-6, distance, -min(axes))  # in the very middle the formula is 0 / 0

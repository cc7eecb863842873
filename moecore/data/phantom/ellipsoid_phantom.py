"""Simulate head scans from ellipsoids with sine folds: a second generator, to test region experts.

Its anatomy, contrast and scanners differ from the first generator (``anatomy``, MNI152 maps); its
people age equally. Nothing trains on it: it tests what models learned from the first. All numbers
are our choice; lengths in mm, from the middle of the head.
"""

from functools import cache

import numpy as np

from moecore.data.layouts.volumes import BRAIN
from moecore.data.phantom import anatomy
from moecore.data.phantom.simulated_person import LifelongTraits
from moecore.data.thread_map import one_blas_thread
from moecore.data.volumes.volume_preparation import VolumeWithTissueShares, pack_stored_volume

# semi-axes along right, anterior, superior
HEAD = (72.0, 88.0, 76.0)
VENTRICLE = (6.0, 30.0, 10.5)
NUCLEUS = (11.0, 20.0, 12.0)
# centres on the right; the left ones are mirrored
VENTRICLE_AT = (14.0, -4.0, 4.0)
NUCLEUS_AT = (30.0, 0.0, -12.0)
# depths below the skull where grey and white matter begin, and the amplitude of their folds
GREY_DEPTH = 3.5
GREY_FOLD = 2.0
WHITE_DEPTH = 17.0
WHITE_FOLD = 7.0
FOLD_MM = 34.0  # from one gyrus to the next

# Brightness is raised to this power before the scan. Grey matter is then at 0.44 of the way from
# fluid to white matter; in the first generator at 0.61, which scanners vary by 0.06 (SD of log).
CONTRAST = 2.5
FIRST_SITE = 1000  # site numbers from here on are in no cohort
SITES = 8
_STREAM = 5  # random stream of the site; the first generator's streams are 1 to 3


def simulate_ellipsoid_scan(age: float, sex: str, seed: int) -> VolumeWithTissueShares:
    """Return a simulated scan, as stored, of person ``seed`` at an age in years; sex: F or M."""
    site = FIRST_SITE + int(np.random.default_rng([seed, _STREAM]).integers(SITES))
    with one_blas_thread():
        brain = LifelongTraits.draw(seed, "realistic").at(age, sex, base=folded_brain_template())
        mask = brain.regions.sum(axis=0) > BRAIN
        brightness = np.clip(brain.brightness, 0, None) ** CONTRAST
        volume = anatomy.scan_brain(brightness, mask, seed, 0, site)
        return pack_stored_volume(volume, brain.regions, mask)


@cache
def folded_brain_template() -> anatomy.Template:
    """Return the template of an ellipsoid head: folded grey matter around white, two ventricles."""
    middle = (anatomy.SIDE - 1) / 2
    points = (anatomy.grid_points() - np.float32(middle)) * np.float32(anatomy.VOXEL_MM)
    points = points.reshape(3, *(anatomy.SIDE,) * 3)
    depth = -ellipsoid_distance(points, HEAD)
    folds = np.sin(points * np.float32(2 * np.pi / FOLD_MM)).sum(axis=0) / 3
    head = anatomy.ventricle_voxel_shares(0.0, -depth)
    brain = anatomy.ventricle_voxel_shares(0.0, GREY_DEPTH + GREY_FOLD * folds - depth)
    core = anatomy.ventricle_voxel_shares(0.0, WHITE_DEPTH + WHITE_FOLD * folds - depth)
    sides = np.abs(points[:1])  # mirror symmetry
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
    """Return approximate distances in mm of points (3, …) to an ellipsoid; negative inside."""
    shape = (3, *(1,) * (points.ndim - 1))
    centred = points - np.reshape(at, shape)
    size = np.reshape(axes, shape)
    radius = np.sqrt(((centred / size) ** 2).sum(axis=0))
    slope = np.sqrt(((centred / size**2) ** 2).sum(axis=0))
    distance = radius * (radius - 1) / np.maximum(slope, 1e-6)
    return np.where(slope > 1e-6, distance, -min(axes))  # at the centre the formula is 0 / 0

"""A simulated person: traits drawn once for life, and the resulting brain at an age.

A second generator makes head scans from ellipsoids with sine folds; lengths in mm, from the middle
of the head. Its anatomy, contrast and scanners differ from the first (``anatomy``, MNI152 maps);
its people age equally. Nothing trains on it: it tests what models learned from the first.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import scipy

from moecore.data.layouts.volumes import BRAIN_SHARE
from moecore.data.phantom import anatomy
from moecore.data.thread_map import one_blas_thread
from moecore.data.volumes.volume_preparation import VolumeWithTissueShares, normalise_and_pack

MAX_REMOVED_SHARE = 0.9  # share of a voxel's tissue that may be removed
REMOVAL_ROUNDS = 4  # of redistributing what voxels at this limit could not give
REMOVAL_TOLERANCE_VOXELS = 0.5  # voxels (0.0135 mL) that may remain unremoved


class TargetTissueShares(NamedTuple):
    """Target volumes of a brain, as shares of the head."""

    grey: float
    white: float
    ventricles: float
    lesions: float


class BrainMaps(NamedTuple):
    """A brain before the scan: float32 (64, 64, 64) shares; white matter includes lesions."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray
    ventricles: np.ndarray
    lesions: np.ndarray

    @property
    def regions(self) -> np.ndarray:
        """Shares of white matter, grey matter and fluid, float32 (3, D, H, W)."""
        return np.stack([self.white, self.grey, self.fluid])


class LifelongTraits(NamedTuple):
    """One person's traits for life, a function of (seed, preset)."""

    gap: float  # brain age − age, years
    # z-scores
    atrophy: float
    boundary: float  # of grey and white matter
    ventricles: float
    lesions: float
    head: float
    pose: anatomy.Pose
    thinning: np.ndarray  # (64, 64, 64), high where cortex is lost first
    spots: np.ndarray  # (64, 64, 64), high where lesions lie
    preset: anatomy.Preset

    @classmethod
    def draw(cls, seed: int, preset: anatomy.Preset = "demo") -> "LifelongTraits":
        """Draw the traits of person ``seed``; scanner and site have other random streams."""
        random = np.random.default_rng([seed, 1])
        spread = anatomy.PRESETS[preset]
        gap, atrophy, boundary, ventricles, head, lesions = random.normal(size=6).tolist()
        pose = anatomy.draw_pose(random, spread.warp)
        thinning, spots = anatomy.draw_smooth_fields(random, 2)
        scores = (gap * spread.gap, atrophy, boundary, ventricles, lesions, head)
        return cls(*scores, pose, thinning, spots, preset)

    def brain(self, age: float, sex: str, base: anatomy.Template | None = None) -> BrainMaps:
        """Return this person's brain at an age in years; ``base`` None uses the MNI152 template."""
        base = base or anatomy.load_template()
        head_ml = anatomy.HEAD_ML[sex] * float(np.exp(anatomy.HEAD_LOG_SD * self.head))
        scale = (head_ml / base.head_ml) ** (1 / 3)
        targets = self.target_shares(base, age, sex)
        ventricle_voxels = targets.ventricles * head_ml / anatomy.VOXEL_ML
        placement = anatomy.place_template(base, self.pose, scale, ventricle_voxels)
        thinning = base.thinning * np.exp(anatomy.CORTEX_THINNING_LOG_SD * self.thinning)
        return shift_tissue_boundaries(placement, targets, thinning, self.spots)

    def target_shares(self, base: anatomy.Template, age: float, sex: str) -> TargetTissueShares:
        brain_age = float(np.clip(age + self.gap, anatomy.MIN_BRAIN_AGE, anatomy.MAX_BRAIN_AGE))
        spread = anatomy.PRESETS[self.preset]
        grey, white, ventricles = base.shares
        boundary_shift = white * spread.boundary * self.boundary
        tissue_factor = 1 + spread.atrophy * self.atrophy
        sex_factor = anatomy.MEN_VENTRICLE_FACTOR if sex == "M" else 1.0
        growth = float(np.exp(spread.ventricles * self.ventricles))
        lesions = anatomy.lesions_ml(brain_age) * float(np.exp(spread.lesions * self.lesions))
        relative = anatomy.tissue_relative_to_25
        return TargetTissueShares(
            grey * relative(anatomy.GREY_ML, brain_age) * tissue_factor - boundary_shift,
            white * relative(anatomy.WHITE_ML, brain_age) * tissue_factor + boundary_shift,
            ventricles * anatomy.ventricles_relative_to_25(brain_age) * growth * sex_factor,
            lesions / anatomy.LESION_REFERENCE_HEAD_ML,
        )


def shift_tissue_boundaries(
    placement: anatomy.PlacedTemplate,
    targets: TargetTissueShares,
    thinning: np.ndarray,  # relative speed of grey matter loss
    spots: np.ndarray,  # high where lesions lie
) -> BrainMaps:
    """Exchange tissue at boundaries until the volumes equal ``targets``; return the brain."""
    _, grey, white, fluid, ventricles, caps = placement
    head = _sum_in_fp64(grey + white + fluid + ventricles)
    surplus = _sum_in_fp64(white) - targets.white * head
    to_grey = tissue_exchange_map(white, grey, surplus, _blur_volume(grey), _blur_volume(white))
    white = white - to_grey
    grey = grey + to_grey
    surplus = _sum_in_fp64(grey) - targets.grey * head
    weight = _blur_volume(fluid) * thinning
    to_fluid = tissue_exchange_map(grey, fluid, surplus, weight, _blur_volume(grey))
    spotted = caps + anatomy.LESION_SPOT_WEIGHT * np.clip(spots - anatomy.LESION_SPOT_MIN, 0, 1)
    lesions = tissue_removal_map(white, spotted**2, targets.lesions * head)
    brightness = placement.brightness - np.float32(anatomy.WHITE) * to_grey
    brightness += np.float32(anatomy.GREY) * (to_grey - to_fluid)
    brightness += np.float32(anatomy.FLUID) * to_fluid - np.float32(anatomy.LESION_DARKER) * lesions
    fluid = fluid + to_fluid + ventricles
    return BrainMaps(brightness, grey - to_fluid, white, fluid, ventricles, lesions)


def tissue_exchange_map(
    source: np.ndarray, sink: np.ndarray, amount: float, weight: np.ndarray, back_weight: np.ndarray
) -> np.ndarray:
    """Return voxel shares, ``amount`` in sum, that turn from source into sink; < 0: the reverse."""
    # amount: sum over voxels; negative moves back. weight, back_weight: per voxel and direction.
    if amount > 0:
        return tissue_removal_map(source, weight, amount)
    return -tissue_removal_map(sink, back_weight, -amount)


def tissue_removal_map(source: np.ndarray, weight: np.ndarray, amount: float) -> np.ndarray:
    """Return each voxel's loss of ``source``, ∝ weight · source and ``amount`` in sum."""
    weighted = weight * source
    limit = MAX_REMOVED_SHARE * source
    result = np.zeros_like(source)
    for _ in range(REMOVAL_ROUNDS):
        remaining = amount - _sum_in_fp64(result)
        if remaining < REMOVAL_TOLERANCE_VOXELS:
            break
        available = weighted * (result < limit)
        share = np.float32(remaining / (_sum_in_fp64(available) + 1e-9))
        result = np.minimum(result + available * share, limit)
    return result


def _sum_in_fp64(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _blur_volume(values: np.ndarray) -> np.ndarray:
    return scipy.ndimage.uniform_filter(values, 3)


# semi-axes along right, anterior, superior
HEAD_RADII = (72.0, 88.0, 76.0)
VENTRICLE_RADII = (6.0, 30.0, 10.5)
NUCLEUS_RADII = (11.0, 20.0, 12.0)
# centres on the right; the left ones are mirrored
VENTRICLE_AT = (14.0, -4.0, 4.0)
NUCLEUS_AT = (30.0, 0.0, -12.0)
# depths below the skull where grey and white matter begin, and the amplitude of their folds
GREY_DEPTH = 3.5
GREY_FOLD_AMPLITUDE = 2.0
WHITE_DEPTH = 17.0
WHITE_FOLD_AMPLITUDE = 7.0
FOLD_WAVELENGTH_MM = 34.0  # from one gyrus to the next

# Brightness is raised to this power before the scan. Grey matter is then at 0.44 of the way from
# fluid to white matter; in the first generator at 0.61, which scanners vary by 0.06 (SD of log).
CONTRAST_EXPONENT = 2.5
FIRST_SITE = 1000  # site numbers from here on are in no cohort
NUMBER_OF_SITES = 8
_STREAM = 5  # random stream of the site; the first generator's streams are 1 to 3


def simulate_ellipsoid_scan(age: float, sex: str, seed: int) -> VolumeWithTissueShares:
    """Simulate a normalised scan of person ``seed`` (sex F or M): ellipsoid head, age in years."""
    site = FIRST_SITE + int(np.random.default_rng([seed, _STREAM]).integers(NUMBER_OF_SITES))
    with one_blas_thread():
        brain = LifelongTraits.draw(seed, "realistic").brain(age, sex, base=folded_brain_template())
        mask = brain.regions.sum(axis=0) > BRAIN_SHARE
        brightness = np.clip(brain.brightness, 0, None) ** CONTRAST_EXPONENT
        volume = anatomy.simulate_scanner(brightness, mask, seed, 0, site)
        return normalise_and_pack(volume, brain.regions, mask)


@cache
def folded_brain_template() -> anatomy.Template:
    """Return the template of an ellipsoid head: folded grey matter around white, two ventricles."""
    middle = (anatomy.SIDE - 1) / 2
    points = (anatomy.voxel_indices() - np.float32(middle)) * np.float32(anatomy.VOXEL_MM)
    points = points.reshape(3, *(anatomy.SIDE,) * 3)
    depth = -ellipsoid_distance(points, HEAD_RADII)
    folds = np.sin(points * np.float32(2 * np.pi / FOLD_WAVELENGTH_MM)).sum(axis=0) / 3
    head = anatomy.compute_inside_shares(0.0, -depth)
    brain = anatomy.compute_inside_shares(0.0, GREY_DEPTH + GREY_FOLD_AMPLITUDE * folds - depth)
    core = anatomy.compute_inside_shares(0.0, WHITE_DEPTH + WHITE_FOLD_AMPLITUDE * folds - depth)
    half = np.concatenate([np.abs(points[:1]), points[1:]])  # mirror symmetry
    distance = ellipsoid_distance(half, NUCLEUS_RADII, NUCLEUS_AT)
    nucleus = anatomy.compute_inside_shares(0.0, distance)
    white = core * (1 - nucleus)
    grey = brain - white
    fluid = head - brain
    brightness = anatomy.FLUID * fluid + anatomy.GREY * grey + anatomy.WHITE * white
    distance = ellipsoid_distance(half, VENTRICLE_RADII, VENTRICLE_AT)
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

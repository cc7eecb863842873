"""A simulated person: traits drawn once for life, and the resulting brain at an age."""

from typing import NamedTuple

import numpy as np
import scipy

from moecore.data.phantom import anatomy

MAX_REMOVED = 0.9  # share of a voxel's tissue that may be removed
ROUNDS = 4  # of redistributing what voxels at this limit could not give
TOLERANCE = 0.5  # voxels (0.0135 mL) that may remain unremoved


class HeadTissueShares(NamedTuple):
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
        thinning, spots = anatomy.smooth_fields(random, 2)
        scores = (gap * spread.gap, atrophy, boundary, ventricles, lesions, head)
        return cls(*scores, pose, thinning, spots, preset)

    def at(self, age: float, sex: str, base: anatomy.Template | None = None) -> BrainMaps:
        """Return this person's brain at an age in years; sex: F or M; base: None for MNI152's."""
        base = base or anatomy.load_template()
        head_ml = anatomy.HEAD_ML[sex] * float(np.exp(anatomy.HEAD_LOG_SD * self.head))
        scale = (head_ml / base.head_ml) ** (1 / 3)
        targets = self.targets(base, age, sex)
        ventricle_voxels = targets.ventricles * head_ml / anatomy.VOXEL_ML
        placement = anatomy.place_template(base, self.pose, scale, ventricle_voxels)
        thinning = base.thinning * np.exp(anatomy.CORTEX_LOG_SD * self.thinning)
        return shift_tissue_boundaries(placement, targets, thinning, self.spots)

    def targets(self, base: anatomy.Template, age: float, sex: str) -> HeadTissueShares:
        """Return this person's tissue volumes at an age, as shares of the head."""
        brain_age = float(np.clip(age + self.gap, anatomy.YOUNGEST, anatomy.OLDEST))
        spread = anatomy.PRESETS[self.preset]
        grey, white, ventricles = base.shares
        boundary_shift = white * spread.boundary * self.boundary
        tissue_factor = 1 + spread.atrophy * self.atrophy
        sex_factor = anatomy.VENTRICLES_OF_MEN if sex == "M" else 1.0
        growth = float(np.exp(spread.ventricles * self.ventricles))
        lesions = anatomy.lesions_ml(brain_age) * float(np.exp(spread.lesions * self.lesions))
        relative = anatomy.tissue_relative_to_25
        return HeadTissueShares(
            grey * relative(anatomy.GREY_ML, brain_age) * tissue_factor - boundary_shift,
            white * relative(anatomy.WHITE_ML, brain_age) * tissue_factor + boundary_shift,
            ventricles * anatomy.ventricles_relative_to_25(brain_age) * growth * sex_factor,
            lesions / anatomy.LESION_HEAD_ML,
        )


def shift_tissue_boundaries(
    placement: anatomy.PlacedTemplate,
    targets: HeadTissueShares,
    thinning: np.ndarray,  # relative speed of grey matter loss
    spots: np.ndarray,  # high where lesions lie
) -> BrainMaps:
    """Return the brain after voxels at tissue boundaries changed until ``targets`` are reached."""
    _, grey, white, fluid, ventricles, caps = placement
    head = _total(grey + white + fluid + ventricles)
    surplus = _total(white) - targets.white * head
    to_grey = tissue_exchange_map(white, grey, surplus, _blur_volume(grey), _blur_volume(white))
    white = white - to_grey
    grey = grey + to_grey
    surplus = _total(grey) - targets.grey * head
    weight = _blur_volume(fluid) * thinning
    to_fluid = tissue_exchange_map(grey, fluid, surplus, weight, _blur_volume(grey))
    spotted = caps + anatomy.LESION_SPOT_WEIGHT * np.clip(spots - anatomy.LESION_SPOT, 0, 1)
    lesions = tissue_removal_map(white, spotted**2, targets.lesions * head)
    brightness = placement.brightness - np.float32(anatomy.WHITE) * to_grey
    brightness += np.float32(anatomy.GREY) * (to_grey - to_fluid)
    brightness += np.float32(anatomy.FLUID) * to_fluid - np.float32(anatomy.LESION_DARKER) * lesions
    fluid = fluid + to_fluid + ventricles
    return BrainMaps(brightness, grey - to_fluid, white, fluid, ventricles, lesions)


def tissue_exchange_map(
    source: np.ndarray, sink: np.ndarray, amount: float, weight: np.ndarray, back_weight: np.ndarray
) -> np.ndarray:
    """Return what moves from ``source`` to ``sink`` per voxel, ``amount`` voxels in sum."""
    # Negative values move back. weight, back_weight: relative amount per voxel, for each direction.
    if amount > 0:
        return tissue_removal_map(source, weight, amount)
    return -tissue_removal_map(sink, back_weight, -amount)


def tissue_removal_map(source: np.ndarray, weight: np.ndarray, amount: float) -> np.ndarray:
    """Return what to take from ``source`` per voxel, ≤ 90 % of it: ``amount`` in sum, ∝ weight."""
    weighted = weight * source
    limit = MAX_REMOVED * source
    result = np.zeros_like(source)
    for _ in range(ROUNDS):
        remaining = amount - _total(result)
        if remaining < TOLERANCE:
            break
        available = weighted * (result < limit)
        share = np.float32(remaining / (_total(available) + 1e-9))
        result = np.minimum(result + available * share, limit)
    return result


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _blur_volume(values: np.ndarray) -> np.ndarray:
    return scipy.ndimage.uniform_filter(values, 3)

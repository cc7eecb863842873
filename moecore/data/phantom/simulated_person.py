"""A simulated person: what is drawn once for life, and the brain that follows from it at an age."""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

from moecore.data.phantom import anatomy
from moecore.data.phantom.anatomy import (
    VOXEL_ML,
    PlacedTemplate,
    Pose,
    Preset,
    Template,
    draw_pose,
    load_template,
    place_template,
    smooth_fields,
)

MOST = 0.9  # of what a voxel holds may be taken from it
ROUNDS = 4  # of sharing out what capped voxels could not give
ENOUGH = 0.5  # voxels: 0.0135 mL; what is left over is smaller than that


class HeadTissueShares(NamedTuple):
    """The volumes that a brain is made to have: shares of the head."""

    grey: float
    white: float
    ventricles: float
    lesions: float


class BrainMaps(NamedTuple):
    """An unscanned brain: float32 (64, 64, 64) shares; lesions are white matter."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray
    ventricles: np.ndarray
    lesions: np.ndarray

    @property
    def regions(self) -> np.ndarray:
        """Float32 (3, D, H, W) of wm, gm, csf."""
        return np.stack([self.white, self.grey, self.fluid])


class LifelongTraits(NamedTuple):
    """What one person is given for life; a function of (seed, preset)."""

    gap: float  # brain age − age, years
    # z-scores
    atrophy: float
    boundary: float  # of grey and white matter
    ventricles: float
    lesions: float
    head: float
    pose: Pose
    thinning: np.ndarray  # (64, 64, 64) where cortex is lost
    spots: np.ndarray  # (64, 64, 64) where lesions lie
    preset: Preset

    @classmethod
    def draw(cls, seed: int, preset: Preset = "demo") -> "LifelongTraits":
        """Draw a person; scanner and site have other random streams."""
        random = np.random.default_rng([seed, 1])
        varies = anatomy.PRESETS[preset]
        gap, atrophy, boundary, ventricles, head, lesions = random.normal(size=6).tolist()
        pose = draw_pose(random, varies.warp)
        thinning, spots = smooth_fields(random, 2)
        scores = (gap * varies.gap, atrophy, boundary, ventricles, lesions, head)
        return cls(*scores, pose, thinning, spots, preset)

    def at(self, age: float, sex: str, base: Template | None = None) -> BrainMaps:
        """The brain of this person at an age in years, as a woman (F) or a man (M)."""
        base = base or load_template()
        head_ml = anatomy.HEAD_ML[sex] * float(np.exp(anatomy.HEAD_LOG_SD * self.head))
        scale = (head_ml / base.head_ml) ** (1 / 3)
        targets = self.targets(base, age, sex)
        placement = place_template(base, self.pose, scale, targets.ventricles * head_ml / VOXEL_ML)
        thinning = base.thinning * np.exp(anatomy.CORTEX_LOG_SD * self.thinning)
        return shift_tissue_boundaries(placement, targets, thinning, self.spots)

    def targets(self, base: Template, age: float, sex: str) -> HeadTissueShares:
        """The volumes of this person at an age, as shares of the head."""
        brain_age = float(np.clip(age + self.gap, anatomy.YOUNGEST, anatomy.OLDEST))
        varies = anatomy.PRESETS[self.preset]
        grey, white, ventricles = base.shares
        moved = white * varies.boundary * self.boundary
        lost = 1 + varies.atrophy * self.atrophy
        men = anatomy.VENTRICLES_OF_MEN if sex == "M" else 1.0
        growth = float(np.exp(varies.ventricles * self.ventricles))
        lesions = anatomy.lesions_ml(brain_age) * float(np.exp(varies.lesions * self.lesions))
        return HeadTissueShares(
            grey * anatomy.grey_matter_relative_to_25(brain_age) * lost - moved,
            white * anatomy.white_matter_relative_to_25(brain_age) * lost + moved,
            ventricles * anatomy.ventricles_relative_to_25(brain_age) * growth * men,
            lesions / anatomy.LESION_HEAD_ML,
        )


def shift_tissue_boundaries(
    placement: PlacedTemplate, targets: HeadTissueShares, thinning: np.ndarray, spots: np.ndarray
) -> BrainMaps:
    """Move tissue across its boundaries until grey and white matter have their shares of the head.

    Both (64, 64, 64). thinning: where grey matter goes first; spots: lesions where it is high.
    """
    _, grey, white, fluid, ventricles, caps = placement
    head = _total(grey + white + fluid + ventricles)
    to_grey = tissue_exchange_map(
        white, grey, _total(white) - targets.white * head, _blur_volume(grey), _blur_volume(white)
    )
    white = white - to_grey
    grey = grey + to_grey
    to_fluid = tissue_exchange_map(
        grey,
        fluid,
        _total(grey) - targets.grey * head,
        _blur_volume(fluid) * thinning,
        _blur_volume(grey),
    )
    spotted = caps + anatomy.LESION_SPOT_WEIGHT * np.clip(spots - anatomy.LESION_SPOT, 0, 1)
    lesions = tissue_removal_map(white, spotted**2, targets.lesions * head)
    brightness = (
        placement.brightness
        - np.float32(anatomy.WHITE) * to_grey
        + np.float32(anatomy.GREY) * (to_grey - to_fluid)
    )
    brightness += np.float32(anatomy.FLUID) * to_fluid - np.float32(anatomy.LESION_DARKER) * lesions
    fluid = fluid + to_fluid + ventricles
    return BrainMaps(brightness, grey - to_fluid, white, fluid, ventricles, lesions)


def tissue_exchange_map(
    source: np.ndarray, sink: np.ndarray, amount: float, where: np.ndarray, back: np.ndarray
) -> np.ndarray:
    """Return what goes from ``source`` to ``sink`` in each voxel, ``amount`` voxels in all, in
    proportion to ``where``; with a negative amount tissue goes the other way, in proportion to
    ``back``, and the result is negative.
    """
    if amount > 0:
        return tissue_removal_map(source, where, amount)
    return -tissue_removal_map(sink, back, -amount)


def tissue_removal_map(source: np.ndarray, weight: np.ndarray, amount: float) -> np.ndarray:
    """Take ``amount`` voxels from ``source``, at most 90 % of a voxel, by ``weight``."""
    wanted = weight * source
    most = MOST * source
    result = np.zeros_like(source)
    for _ in range(ROUNDS):
        left = amount - _total(result)
        if left < ENOUGH:
            break
        open_voxels = wanted * (result < most)
        result = np.minimum(
            result + open_voxels * np.float32(left / (_total(open_voxels) + 1e-9)), most
        )
    return result


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _blur_volume(values: np.ndarray) -> np.ndarray:
    return ndimage.uniform_filter(values, 3)

"""What is unusual or impossible about a volume as it is stored."""

from collections.abc import Mapping

import numpy as np
from scipy import ndimage

from moecore.data.volumes.volume_preparation import BRAIN

# shares of the head, wide enough for ages 18 to 95 with atrophy
USUAL = {"wm": (0.2, 0.5), "gm": (0.3, 0.7), "csf": (0.03, 0.45)}
BRIGHTNESS = (0.2, 0.85)  # mean over the brain of a normalised T1-weighted image
POSSIBLE = {"wm": (0.1, 0.7), "gm": (0.15, 0.85), "csf": (0.0, 0.7)}
HEAD_ML = (500, 3000)  # tissue and fluid in an adult's head, with room for any segmentation
# rounding of a share; of a sum of shares; share of the voxels that may exceed it
SLACK = 0.02
OVERLAP = 0.1
RARE = 0.01
# brighter than this × the 99th percentile is seen; share of the brain's volume that may lie outside
# it
DIM = 0.1
OUTSIDE = 0.15
# of the voxels that a stripped brain may fill; of the brain that a crop may lose
FULL = 0.7
LOST = 0.01


def unusual_volume_flags(image: np.ndarray, regions: np.ndarray | None) -> list[str]:
    """Short texts on what to look at: image (1, D, H, W), regions uint8 (3, D, H, W) or None."""
    texts = []
    mean = image[image > 0].astype(np.float32).mean()
    if not BRIGHTNESS[0] <= mean <= BRIGHTNESS[1]:
        texts.append(f"mean intensity unusual ({mean:.2f})")
    if regions is None:
        return texts
    if unusual := _shares_outside(regions, USUAL):
        texts.append(f"tissue fractions unusual ({unusual})")
    masks = [part > 255 * BRAIN for part in regions[:2]]
    white, grey = (image[0][mask].sum(dtype=np.float64) / max(mask.sum(), 1) for mask in masks)
    if not (white > grey and masks[1].any()):
        texts.append("white matter not brighter than grey matter: not T1-weighted?")
    return texts


def tissue_map_range_problem(region: np.ndarray) -> str | None:
    """Return why a map (D, H, W) is not one of tissue shares, or None."""
    low = float(region.min())
    high = float(region.max())
    if low < -SLACK or high > 1 + SLACK:
        return f"tissue shares run from {low:.2f} to {high:.2f}; allowed: 0 to 1"
    return None


def tissue_problem(regions: np.ndarray, voxel_ml: float) -> str | None:
    """Return what no head can have, or None; regions: shares fp32 (3, D, H, W)."""
    total = regions.sum(axis=0)
    if (over := float((total > 1 + OVERLAP).mean())) > RARE:
        where = f"{over:.1%} of the voxels (up to {total.max():.2f})"
        return f"tissue shares add up to more than 1 in {where}"
    head = float(total.sum(dtype=np.float64)) * voxel_ml
    if not HEAD_ML[0] <= head <= HEAD_ML[1]:
        return f"the tissue maps hold {head:.0f} mL; possible: {HEAD_ML[0]} to {HEAD_ML[1]} mL"
    if wrong := _shares_outside(regions, POSSIBLE):
        limits = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in POSSIBLE.items())
        return f"tissue fractions are impossible: {wrong}; possible: {limits}"
    return None


def _shares_outside(regions: np.ndarray, limits: Mapping[str, tuple[float, float]]) -> str:
    """Return the tissues whose share of all tissue, in any unit, is not within its limits."""
    sums = regions.sum(axis=(1, 2, 3), dtype=np.float64)
    shares = zip(limits.items(), sums / max(sums.sum(), 1e-12), strict=True)
    return ", ".join(
        f"{name} {share:.2f}" for (name, (low, high)), share in shares if not low <= share <= high
    )


def skull_problem(volume: np.ndarray, mask: np.ndarray, from_maps: bool) -> str | None:
    """Return why a volume (D, H, W) seems to show more than the brain, or None."""
    way = "strip the skull, or give a brain mask (`mask`)"
    if not mask.any():
        return "there is no brain in it (no voxel inside the mask)"
    if not from_maps:
        if (share := float(mask.mean())) <= FULL:
            return None
        return f"not skull-stripped: {share:.0%} of its voxels are above 0; {way}"
    bright = volume > DIM * np.percentile(volume[mask], 99)
    outside = (bright & ~ndimage.binary_dilation(mask, iterations=2)).sum() / mask.sum()
    if outside <= OUTSIDE:
        return None
    given = f"bright voxels outside the tissue make {outside:.0%} of the brain"
    return f"not skull-stripped: {given}; {way}"


def voxel_count_problem(
    shape: tuple[int, ...], zooms: tuple[float, ...], voxel_mm: float, most: int
) -> str | None:
    """Return why a volume has more than ``most`` voxels on voxels of ``voxel_mm``, or None."""
    sides = np.multiply(shape, zooms)
    number = np.maximum(sides / voxel_mm, 1).prod()
    if number <= most:
        return None
    given = f"{' × '.join(f'{side:,.0f}' for side in sides)} mm large, {number:,.0f} voxels"
    way = "cut it, or use a larger `voxel_mm`"
    return f"is {given} of {voxel_mm:g} mm; allowed: up to {most:,}; {way}"


def cropped_brain_problem(inside: np.ndarray, kept: np.ndarray) -> str | None:
    """Return why the brain does not fit into a window, or None; masks before, after the cut."""
    lost = 1 - float(kept.sum()) / float(inside.sum())
    if lost <= LOST:
        return None
    size = "×".join(map(str, kept.shape))
    return f"{lost:.1%} of the brain lies outside {size} voxels; use a larger `size` or `voxel_mm`"

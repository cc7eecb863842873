"""What is unusual or impossible about a volume as it is stored."""

import numpy as np
from scipy import ndimage

from moecore.data.volumes.grids import BRAIN

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


def tissue_shares(regions: np.ndarray) -> dict[str, float]:
    """Share of wm, gm and csf in all tissue; regions (3, D, H, W) in any unit.

    All 0 where there is no tissue.
    """
    sums = regions.reshape(len(regions), -1).sum(axis=1, dtype=np.float64)
    return dict(zip(USUAL, (sums / max(sums.sum(), 1e-12)).tolist(), strict=True))


def volume_flags(image: np.ndarray, regions: np.ndarray | None) -> list[str]:
    """Short texts on what to look at: image (1, D, H, W) in [0, 1] as stored, regions uint8
    (3, D, H, W) of wm, gm, csf or None.
    """
    inside = image[image > 0].astype(np.float32)
    texts = []
    if not BRIGHTNESS[0] <= inside.mean() <= BRIGHTNESS[1]:
        texts.append(f"mean intensity unusual ({inside.mean():.2f})")
    if regions is None:
        return texts
    unusual = [
        f"{name} {share:.2f}"
        for name, share in tissue_shares(regions).items()
        if not USUAL[name][0] <= share <= USUAL[name][1]
    ]
    if unusual:
        texts.append(f"tissue fractions unusual ({', '.join(unusual)})")
    white, grey = (_brightness(image, part) for part in regions[:2])
    # also where one of the two tissues is nowhere: a comparison with NaN is false
    if not white > grey:
        texts.append("white matter not brighter than grey matter: not T1-weighted?")
    return texts


def _brightness(image: np.ndarray, part: np.ndarray) -> float:
    """Mean of an image (1, D, H, W) where most of a voxel is of one tissue; NaN where none is."""
    inside = part > 255 * BRAIN
    if not inside.any():
        return float("nan")
    return float(image[0][inside].mean(dtype=np.float64))


def range_problem(region: np.ndarray) -> str | None:
    """Return why a map (D, H, W) is not one of tissue shares, or None."""
    low = float(region.min())
    high = float(region.max())
    if low < -SLACK or high > 1 + SLACK:
        return f"tissue shares run from {low:.2f} to {high:.2f}; allowed: 0 to 1"
    return None


def tissue_problems(regions: np.ndarray, voxel_ml: float) -> list[str]:
    """Return what no head can have: regions fp32 (3, D, H, W), tissue shares of wm, gm, csf;
    ``voxel_ml``: volume of a voxel.
    """
    total = regions.sum(axis=0)
    if (over := float((total > 1 + OVERLAP).mean())) > RARE:
        return [
            (
                f"tissue shares add up to more than 1 in {over:.1%} of the voxels (up to "
                f"{total.max():.2f})"
            )
        ]
    head = float(total.sum(dtype=np.float64)) * voxel_ml
    if not HEAD_ML[0] <= head <= HEAD_ML[1]:
        return [f"the tissue maps hold {head:.0f} mL; possible: {HEAD_ML[0]} to {HEAD_ML[1]} mL"]
    shares = tissue_shares(regions)
    wrong = [
        f"{name} {share:.2f}"
        for name, share in shares.items()
        if not POSSIBLE[name][0] <= share <= POSSIBLE[name][1]
    ]
    limits = ", ".join(
        f"{name} {lowest:g} to {highest:g}" for name, (lowest, highest) in POSSIBLE.items()
    )
    if wrong:
        return [f"tissue fractions are impossible: {', '.join(wrong)}; possible: {limits}"]
    return []


def skull_problem(volume: np.ndarray, mask: np.ndarray, from_maps: bool) -> str | None:
    """Return why a volume (D, H, W) seems to show more than the brain, or None; ``mask`` bool, from
    tissue maps or where the volume is above 0.
    """
    if not mask.any():
        return "there is no brain in it (no voxel inside the mask)"
    if not from_maps:
        share = float(mask.mean())
        if share > FULL:
            return (
                f"not skull-stripped: {share:.0%} of its voxels are above 0; strip the skull, or "
                "give a brain mask (`mask`)"
            )
        return None
    bright = volume > DIM * np.percentile(volume[mask], 99)
    outside = float((bright & ~ndimage.binary_dilation(mask, iterations=2)).sum()) / float(
        mask.sum()
    )
    if outside <= OUTSIDE:
        return None
    return (
        f"not skull-stripped: bright voxels outside the tissue make {outside:.0%} of the brain; "
        "strip the skull, or give a brain mask (`mask`)"
    )


def size_problem(
    shape: tuple[int, ...], zooms: tuple[float, ...], voxel_mm: float, most: int
) -> str | None:
    """Return why a volume has more than ``most`` voxels on voxels of ``voxel_mm``, or None."""
    sides = [length * zoom for length, zoom in zip(shape, zooms, strict=True)]
    number = np.prod([max(side / voxel_mm, 1) for side in sides])
    if number <= most:
        return None
    extent = " × ".join(f"{side:,.0f}" for side in sides)
    return (
        f"is {extent} mm large, {number:,.0f} voxels of {voxel_mm:g} mm; allowed: up to {most:,}; "
        "cut it, or use a larger `voxel_mm`"
    )


def crop_problem(inside: np.ndarray, kept: np.ndarray, size: tuple[int, int, int]) -> str | None:
    """Return why the brain does not fit into ``size``, or None; masks before, after the cut."""
    lost = 1 - float(kept.sum()) / float(inside.sum())
    if lost > LOST:
        return (
            f"{lost:.1%} of the brain lies outside {'×'.join(map(str, size))} voxels; use a larger "
            "`size` or `voxel_mm`"
        )
    return None

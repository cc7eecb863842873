"""What prepare and predict store of a subject: intensities in [0, 1], background 0."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.data.volumes.volume_preparation import (
    BRAIN,
    MOST,
    Grid,
    UnusableVolume,
    Volume,
    brain_window_start,
    cropped_brain_problem,
    cut_window,
    load_volume,
    place_mismatch,
    resample_masked_volume,
    resample_volume,
    skull_problem,
    tissue_map_range_problem,
    tissue_problem,
    voxel_count_problem,
)

DARKEST = 0.01  # of a voxel inside the mask, so that the mask can be read off: value > 0
PERCENTILES = (1.0, 99.0)
REGIONS = ("wm", "gm", "csf")


class VolumeWithTissueShares(NamedTuple):
    """image float16 (1, D, H, W) in [0, 1], regions uint8 (3, D, H, W) share × 255, or None."""

    image: np.ndarray
    regions: np.ndarray | None


def read_subject_volumes(
    files: Mapping[str, Path], grid: Grid, labels: Mapping[str, tuple[int, ...]] | None = None
) -> VolumeWithTissueShares:
    """Read what is stored of one subject. Raises UnusableVolume, one line per problem.

    files: "t1", perhaps "mask", and tissue as maps ("wm", "gm", "csf"), as one label map ("dseg")
    whose numbers are the ``labels`` of each region, or neither. Brain: the mask file, else where
    tissue is more than half, else T1 > 0 (skull-stripped).
    """
    volumes = _load_volumes(files)
    t1 = volumes["t1"]
    regions = _tissue_regions(volumes, labels)
    if regions is not None:
        first, *others = [path for name, path in files.items() if name not in ("t1", "mask")]
        named = ", ".join([str(first), *(path.name for path in others)])
        _refuse(named, tissue_problem(regions, float(np.prod(t1.zooms)) / 1000))
    if "mask" in volumes:
        mask = volumes["mask"].values > BRAIN
    else:
        mask = t1.values > 0 if regions is None else regions.sum(axis=0) > BRAIN
        _refuse(files["t1"], skull_problem(t1.values, mask, regions is not None))
    return _store_on_grid(files["t1"], t1, regions, mask, grid)


def read_volume(path: str | Path, grid: Grid, mask: str | Path | None = None) -> np.ndarray:
    """One T1-weighted volume as a model takes it: float16 (1, D, H, W) in [0, 1]; the brain is
    ``mask``, else where the volume is above 0.

    Raises UnusableVolume that lists everything that is wrong with it.
    """
    files = {"t1": Path(path)}
    if mask:
        files["mask"] = Path(mask)
    return read_subject_volumes(files, grid).image


def normalise_intensities(volume: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Intensities' 1st to 99th percentile in ``mask`` to [0.01, 1], 0 outside; fp32 (D, H, W).

    Invariant to positive gain and offset. ValueError where it is constant inside the mask.
    """
    inside = volume[mask].astype(np.float64)
    low, high = np.percentile(inside, PERCENTILES)
    if not high > low:
        raise ValueError(f"all intensities inside the brain are {low:g}")
    image = np.zeros(volume.shape, np.float32)
    image[mask] = DARKEST + (1 - DARKEST) * np.clip((inside - low) / (high - low), 0, 1)
    return image


def pack_stored_volume(
    volume: np.ndarray, regions: np.ndarray | None, mask: np.ndarray
) -> VolumeWithTissueShares:
    """Return what is stored of a volume (D, H, W), shares (R, D, H, W) and a brain mask."""
    image = normalise_intensities(volume, mask).astype(np.float16)[None]
    if regions is None:
        return VolumeWithTissueShares(image, None)
    return VolumeWithTissueShares(image, np.rint(np.clip(regions, 0, 1) * 255).astype(np.uint8))


def _refuse(where: str | Path, problem: str | None) -> None:
    if problem:
        raise UnusableVolume(f"{where}: {problem}")


def _load_volumes(files: Mapping[str, Path]) -> dict[str, Volume]:
    """All files of a subject, which lie on the T1's voxels; raises all that is wrong at once."""
    volumes = {}
    problems = []
    for name, path in files.items():
        try:
            volumes[name] = load_volume(path)
        except UnusableVolume as error:
            problems.append(str(error))
    if not problems:
        for name, volume in volumes.items():
            why = place_mismatch(volumes["t1"], volume)
            if why is None and name in REGIONS:
                why = tissue_map_range_problem(volume.values)
            if why:
                problems.append(f"{files[name]}: {why}")
    if problems:
        raise UnusableVolume(*problems)
    return volumes


def _tissue_regions(
    volumes: Mapping[str, Volume], labels: Mapping[str, tuple[int, ...]] | None
) -> np.ndarray | None:
    """Tissue shares fp32 (3, D, H, W) of wm, gm, csf, on the T1's voxels."""
    if labels is not None:
        numbers = np.rint(volumes["dseg"].values)
        return np.stack([np.isin(numbers, labels[name]) for name in REGIONS]).astype(np.float32)
    if "wm" in volumes:
        return np.stack([volumes[name].values for name in REGIONS])
    return None


def _store_on_grid(
    path: Path, t1: Volume, regions: np.ndarray | None, mask: np.ndarray, grid: Grid
) -> VolumeWithTissueShares:
    _refuse(path, voxel_count_problem(t1.values.shape, t1.zooms, grid.voxel_mm, MOST))
    volume, inside = resample_masked_volume(t1.values, mask, t1.zooms, grid.voxel_mm)
    if not inside.any():
        raise UnusableVolume(f"{path}: the brain mask is empty")
    start = brain_window_start(inside, grid.size)
    kept = cut_window(inside, start, grid.size)
    _refuse(path, cropped_brain_problem(inside, kept))
    if regions is not None:
        parts = [resample_volume(part, t1.zooms, grid.voxel_mm) for part in regions]
        regions = np.stack([cut_window(part, start, grid.size) for part in parts])
    try:
        return pack_stored_volume(cut_window(volume, start, grid.size), regions, kept)
    except ValueError as error:
        raise UnusableVolume(f"{path}: {error}") from None

"""From a subject's files to what is stored of them: intensities in [0, 1] inside the brain,
background 0. Shared by prepare and predict.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.data.volumes.grids import (
    BRAIN,
    Grid,
    brain_window,
    cut_window,
    resample_inside,
    resample_volume,
)
from moecore.data.volumes.nifti import MOST, UnusableVolume, Volume, load_volume, place_mismatch
from moecore.data.volumes.volume_checks import (
    crop_problem,
    range_problem,
    size_problem,
    skull_problem,
    tissue_problems,
)

DARKEST = 0.01  # of a voxel inside the mask, so that the mask can be read off: value > 0
PERCENTILES = (1.0, 99.0)
REGIONS = ("wm", "gm", "csf")


class SubjectFiles(NamedTuple):
    """Where a subject's volumes lie: tissue as ``maps`` (wm, gm, csf → file), as one label map
    ``dseg``, or neither; a brain ``mask`` or None.
    """

    t1: Path
    mask: Path | None = None
    maps: Mapping[str, Path] | None = None
    dseg: Path | None = None


class StoredVolume(NamedTuple):
    """A subject as ``prepare`` stores it: image float16 (1, D, H, W) in [0, 1], regions uint8
    (3, D, H, W) share × 255, or None without maps.
    """

    image: np.ndarray
    regions: np.ndarray | None


def read_subject(
    files: SubjectFiles, grid: Grid, labels: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[StoredVolume | None, list[str]]:
    """Read one subject: what is stored of it, or None and everything that is wrong, a line a
    problem with the file's name.

    labels: region → its numbers in a ``dseg`` file. Brain: the mask file, else where tissue is more
    than half, else T1 > 0 (skull-stripped).
    """
    problems: list[str] = []
    paths = {"t1": files.t1, "mask": files.mask, **(files.maps or {}), "dseg": files.dseg}
    loaded = {}
    for name, path in paths.items():
        volume = _load_or_report(path, problems) if path else None
        if volume is not None:
            loaded[name] = volume
    if problems:
        return None, problems
    t1 = loaded["t1"]
    for name, volume in loaded.items():
        why = place_mismatch(t1, volume)
        if why is None and name in REGIONS:
            why = range_problem(volume.values)
        if why:
            problems.append(f"{paths[name]}: {why}")
    if problems:
        return None, problems
    regions = _tissue_regions(loaded, files, labels)
    if regions is not None and (whys := tissue_problems(regions, float(np.prod(t1.zooms)) / 1000)):
        return None, [f"{_tissue_files(files)}: {why}" for why in whys]
    if files.mask:
        mask = loaded["mask"].values > BRAIN
    elif regions is not None:
        mask = regions.sum(axis=0) > BRAIN
    else:
        mask = t1.values > 0
    if not files.mask and (why := skull_problem(t1.values, mask, regions is not None)):
        return None, [f"{files.t1}: {why}"]
    return _store_on_grid(files.t1, t1, regions, mask, grid)


def read_volume(path: str | Path, grid: Grid, mask: str | Path | None = None) -> np.ndarray:
    """One T1-weighted volume as a model takes it: float16 (1, D, H, W) in [0, 1]; the brain is
    ``mask``, else where the volume is above 0.

    Raises UserError that lists everything that is wrong with it.
    """
    files = SubjectFiles(Path(path))
    if mask:
        files = files._replace(mask=Path(mask))
    made, problems = read_subject(files, grid)
    if made is None:
        raise UserError("; ".join(problems))
    return made.image


def normalise_intensities(volume: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Intensities inside ``mask`` from their 1st and 99th percentile to [0.01, 1], clipped; exactly
    0 outside; fp32 (D, H, W).

    Invariant to a positive gain and to an offset of the volume. Raises ValueError where the mask is
    empty or the volume is constant or not finite inside it.
    """
    inside = volume[mask].astype(np.float64)
    if not inside.size or not np.isfinite(inside).all():
        raise ValueError(
            "not all intensities inside the brain are numbers"
            if inside.size
            else "the brain mask is empty"
        )
    low, high = np.percentile(inside, PERCENTILES)
    if not high > low:
        raise ValueError(f"all intensities inside the brain are {low:g}")
    image = np.zeros(volume.shape, np.float32)
    image[mask] = DARKEST + (1 - DARKEST) * np.clip((inside - low) / (high - low), 0, 1)
    return image


def to_stored(volume: np.ndarray, regions: np.ndarray | None, mask: np.ndarray) -> StoredVolume:
    """Return what is stored of a volume (D, H, W), tissue shares (R, D, H, W) in [0, 1] and a brain
    mask that lie on the final grid.
    """
    if regions is None:
        shares = None
    else:
        shares = np.rint(np.clip(regions, 0, 1) * 255).astype(np.uint8)
    return StoredVolume(normalise_intensities(volume, mask).astype(np.float16)[None], shares)


def _load_or_report(path: Path, problems: list[str]) -> Volume | None:
    try:
        return load_volume(path)
    except UnusableVolume as error:
        problems.append(str(error))
        return None


def _tissue_files(files: SubjectFiles) -> str:
    given = [files.dseg] if files.dseg else list((files.maps or {}).values())
    first, *others = given
    return ", ".join([str(first), *(path.name for path in others)])


def _tissue_regions(
    loaded: Mapping[str, Volume], files: SubjectFiles, labels: Mapping[str, tuple[int, ...]] | None
) -> np.ndarray | None:
    """Tissue shares fp32 (3, D, H, W) of wm, gm, csf, on the T1's voxels."""
    if files.maps:
        return np.stack([loaded[name].values for name in REGIONS])
    if files.dseg and labels is not None:
        numbers = np.rint(loaded["dseg"].values)
        return np.stack([np.isin(numbers, labels[name]) for name in REGIONS]).astype(np.float32)
    return None


def _store_on_grid(
    path: Path, t1: Volume, regions: np.ndarray | None, mask: np.ndarray, grid: Grid
) -> tuple[StoredVolume | None, list[str]]:
    if why := size_problem(t1.values.shape, t1.zooms, grid.voxel_mm, MOST):
        return None, [f"{path}: {why}"]
    volume, inside = resample_inside(t1.values, mask, t1.zooms, grid.voxel_mm)
    if not inside.any():
        return None, [f"{path}: the brain mask is empty"]
    start = brain_window(inside, grid.size)
    kept = cut_window(inside, start, grid.size)
    if why := crop_problem(inside, kept, grid.size):
        return None, [f"{path}: {why}"]
    if regions is None:
        shares = None
    else:
        shares = np.stack(
            [
                cut_window(resample_volume(part, t1.zooms, grid.voxel_mm), start, grid.size)
                for part in regions
            ]
        )
    try:
        return to_stored(cut_window(volume, start, grid.size), shares, kept), []
    except ValueError as error:
        return None, [f"{path}: {error}"]

"""From a subject's NIfTI or FreeSurfer (.mgz) files to the stored volume.

A file is read in canonical orientation and brought to the grid that all volumes share; intensities
end in [0, 1] with background 0. What is unusual or impossible about the result is named.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from scipy import ndimage

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.layouts.volumes import BRAIN, tissue_shares_outside

# two affines are the same where they put every corner of the volume closer than this
APART_MM = 0.1
MOST = 512**3  # voxels: a head at 0.5 mm; their values take half a gigabyte
MAX_HEADER = 2**26  # bytes before the values; extensions of scanners take a few thousand
NUMBERS = "biuf"  # numpy's kinds that are real numbers; not complex ones, not colours


class UnusableVolume(UserError):
    """Why volumes cannot be used: ``problems``, a line each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class Volume(NamedTuple):
    """Values fp32 (D, H, W), axes as RAS; voxel sizes in mm; affine (4, 4) to scanner mm."""

    values: np.ndarray
    zooms: tuple[float, ...]
    affine: np.ndarray


def load_volume(path: Path) -> Volume:
    """Read a NIfTI or .mgz file whole and turn it to canonical axes, without interpolation.

    Raises UnusableVolume on files that are missing, damaged or truncated, not 3-D, without an
    orientation, or with values that are no numbers.
    """
    import nibabel  # a third of a second, for those who use it

    if not path.is_file():  # reading a pipe would wait for ever
        raise UnusableVolume(f"{path}: {'no file' if path.exists() else 'no such file'}")
    damage = (
        *(OSError, EOFError, ValueError, OverflowError, zlib.error, struct.error),
        *(KeyError, TypeError),  # nibabel's, of unknown numbers of kinds, and of short files
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
        nibabel.freesurfer.mghformat.MGHError,
        nibabel.orientations.OrientationError,
    )
    try:
        return _read_volume(path)
    except damage as error:
        why = " ".join(str(error).split())
        raise UnusableVolume(f"{path}: cannot be read, damaged or truncated ({why})") from error


def _read_volume(path: Path) -> Volume:
    import nibabel

    header, file = _read_header(path)
    if why := _header_problem(header):
        raise UnusableVolume(f"{path}: {why}")
    stored: Any = nibabel.arrayproxy.ArrayProxy(file, header)
    values = np.asarray(stored, dtype=np.float32).reshape(stored.shape[:3])
    if bad := int((~np.isfinite(values)).sum()):
        raise UnusableVolume(f"{path}: {bad} voxels are no numbers (NaN or infinite)")
    image = nibabel.as_closest_canonical(nibabel.Nifti1Image(values, header.get_best_affine()))
    zooms = tuple(float(side) for side in np.linalg.norm(image.affine[:3, :3], axis=0))
    return Volume(np.ascontiguousarray(image.dataobj, dtype=np.float32), zooms, image.affine)


def place_mismatch(one: Volume, other: Volume) -> str | None:
    """Return why two volumes do not lie on the same voxels, or None where they do."""
    if one.values.shape != other.values.shape:
        return f"has the shape {other.values.shape}, the T1 {one.values.shape}"
    ends = [(0, length - 1) for length in one.values.shape]
    corners = np.array(np.meshgrid(*ends, 1)).reshape(4, -1)
    apart = float(np.linalg.norm(((one.affine - other.affine) @ corners)[:3], axis=0).max())
    if apart > APART_MM:
        return f"has another affine than the T1: a corner lies {apart:.1f} mm apart"
    return None


def _read_header(path: Path) -> tuple[Any, Any]:
    """Return nibabel's header, without extensions, and the file of the values.

    ``nibabel.load`` unpacks extensions, which nothing here needs, of any length that the file says,
    and skips as many values of .mgz; a few megabytes of gzip hold gigabytes of zeros.
    """
    from nibabel import MGHImage, Nifti1Image, Nifti1Pair, Nifti2Image, Nifti2Pair

    start = None  # bytes that tell kinds of files apart
    for kind in (Nifti1Pair, Nifti1Image, Nifti2Pair, Nifti2Image):
        is_kind, start = kind.path_maybe_image(path, start)
        if is_kind:
            files = kind.filespec_to_file_map(path)
            with files["header" if "header" in files else "image"].get_prepare_fileobj() as file:
                header = kind.header_class(file.read(kind.header_class.sizeof_hdr))
            if not 0 <= (offset := header.get_data_offset()) <= MAX_HEADER:
                said = f"its values begin at byte {offset:,}; allowed: up to {MAX_HEADER:,}"
                raise UnusableVolume(f"{path}: {said}")
            return header, files["image"].filename
    if not MGHImage.path_maybe_image(path)[0]:
        raise UnusableVolume(f"{path}: neither NIfTI nor .mgz, or damaged")
    surfer: Any = MGHImage.filespec_to_file_map(path)["image"]
    with surfer.get_prepare_fileobj() as file:
        shape = struct.unpack(">4i", file.read(20)[4:])
        if math.prod(shape) > MOST:
            raise UnusableVolume(f"{path}: {_voxel_count_problem(shape)}")
        file.seek(0)
        return MGHImage.header_class.from_fileobj(file), path


def _voxel_count_problem(shape: Sequence[int]) -> str:
    return f"has the shape {tuple(shape)}; allowed: up to {MOST:,} voxels"


def _header_problem(header: Any) -> str | None:
    """Return what is wrong with shape, kind of values or orientation; no value is read."""
    shape = header.get_data_shape()
    if len(shape) < 3 or min(shape) < 1 or any(length != 1 for length in shape[3:]):
        return f"has the shape {shape}; allowed: one 3-D volume"
    if math.prod(shape) > MOST:
        return _voxel_count_problem(shape)
    if header.get_data_dtype().kind not in NUMBERS:
        return f"its values are {header.get_data_dtype()}; allowed: whole and real numbers"
    if header.get("sform_code", 1) == 0 and header.get("qform_code", 1) == 0:
        return (
            "says no orientation (sform_code and qform_code are 0); left and right cannot be known"
        )
    if not abs(np.linalg.det(header.get_best_affine()[:3, :3])) >= 1e-6:  # NaN is not, either
        return "its affine is singular or has values that are no numbers"
    return None


TILE = 16  # voxels: cubes of this side tile every stored volume
FWHM_TO_SD = 2 * np.sqrt(2 * np.log(2))
SAME_MM = 1e-3  # voxel sizes that differ less are the same


class Grid(Config):
    """The voxels that every volume is brought to; axes run right, anterior, superior (RAS)."""

    voxel_mm: float = Field(
        3.0, gt=0, le=20, description="Side of a voxel in mm; volumes are resampled to it"
    )
    size: tuple[int, int, int] = Field(
        (64, 64, 64), description="Right, anterior, superior, in voxels; multiples of 16"
    )

    @model_validator(mode="after")
    def _tiled(self) -> Self:
        if any(length <= 0 or length % TILE for length in self.size):
            allowed = f"multiples of {TILE}, so that cubes of {TILE}³ tile the volume"
            raise ValueError(f"size is {list(self.size)}; allowed: {allowed}")
        return self


def resample_volume(volume: np.ndarray, zooms: tuple[float, ...], voxel_mm: float) -> np.ndarray:
    """A volume resampled from ``zooms`` to ``voxel_mm``: linear, smoothed before shrinking; fp32.

    Both grids have the same centre. A volume that has that voxel size already is returned as it is.
    """
    factors = voxel_mm / np.asarray(zooms, np.float64)  # old voxels per new one
    if np.all(np.abs(factors - 1) * voxel_mm < SAME_MM):
        return volume.astype(np.float32, copy=False)
    # a voxel's own width counts as a FWHM of 1
    smoothing = np.sqrt(np.maximum(factors**2 - 1, 0)) / FWHM_TO_SD
    smooth = ndimage.gaussian_filter(volume.astype(np.float32), smoothing, mode="constant")
    shape = tuple(int(length) for length in np.ceil(np.array(volume.shape) / factors - 1e-6))
    offset = (np.array(volume.shape) - 1) / 2 - factors * (np.array(shape) - 1) / 2
    return ndimage.affine_transform(
        smooth, factors, offset, shape, order=1, mode="constant", output=np.float32
    )


def resample_masked_volume(
    volume: np.ndarray, mask: np.ndarray, zooms: tuple[float, ...], voxel_mm: float
) -> tuple[np.ndarray, np.ndarray]:
    """Like ``resample_volume`` of the mask's inside; values, and the new mask, bool."""
    weight = resample_volume(mask.astype(np.float32), zooms, voxel_mm)
    values = resample_volume(np.where(mask, volume, 0), zooms, voxel_mm)
    inside = weight >= BRAIN
    return np.where(inside, values / np.maximum(weight, BRAIN), 0).astype(np.float32), inside


def brain_window_start(mask: np.ndarray, size: tuple[int, int, int]) -> tuple[int, ...]:
    """First index per axis of ``size`` voxels around the mask's middle (negative: padding).

    Zeros for a volume that has this size already: then nothing moves.
    """
    if mask.shape == tuple(size):
        return (0, 0, 0)
    bounds = [np.flatnonzero(mask.any(axis=axes))[[0, -1]] for axes in ((1, 2), (0, 2), (0, 1))]
    return tuple(
        int(low + high + 1) // 2 - length // 2
        for (low, high), length in zip(bounds, size, strict=True)
    )


def cut_window(
    volume: np.ndarray, start: tuple[int, ...], size: tuple[int, int, int]
) -> np.ndarray:
    """``size`` voxels of a volume (D, H, W) from ``start``; zeros where there is none."""
    axes = list(zip(start, size, volume.shape, strict=True))
    padded = np.pad(volume, [(max(-at, 0), max(at + n - length, 0)) for at, n, length in axes])
    return padded[tuple(slice(max(at, 0), max(at, 0) + n) for at, n, _ in axes)]


# shares of the head
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
    if wrong := tissue_shares_outside(regions, POSSIBLE):
        limits = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in POSSIBLE.items())
        return f"tissue fractions are impossible: {wrong}; possible: {limits}"
    return None


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

"""Read a subject's NIfTI or FreeSurfer (.mgz) files, and resample and normalise the volume."""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import scipy
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.source_layout import import_optional_library
from moecore.data.layouts.volumes import BRAIN_SHARE, list_tissues_past_limits

AFFINE_TOLERANCE_MM = 0.1  # affines are equal if no corner of the volume lies farther apart
MAX_VOXELS = 512**3  # a head at 0.5 mm, half a gigabyte of values
MAX_HEADER = 2**26  # bytes before the values; extensions of scanners take a few thousand
REAL_NUMBER_KINDS = "biuf"  # numpy's kinds of real numbers; without complex numbers and colours
MIN_BRIGHTNESS = 0.01  # of a voxel inside the mask, so that value > 0 gives the mask
PERCENTILES = (1.0, 99.0)
TISSUES = ("wm", "gm", "csf")


class UnusableVolume(UserError):
    """Error for a volume that cannot be used; ``problems`` lists the reasons."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class Volume(NamedTuple):
    values: np.ndarray  # fp32 (D, H, W), on RAS axes
    zooms: tuple[float, ...]  # voxel sizes, mm
    affine: np.ndarray  # (4, 4), to scanner mm


def load_volume(path: Path) -> Volume:
    """Read a NIfTI or .mgz file as a volume on RAS axes; UnusableVolume if it is damaged."""
    nibabel = import_optional_library("nibabel", "brain")  # takes a third of a second to import

    if not path.is_file():  # reading a pipe would never end
        raise UnusableVolume(f"{path}: {'no file' if path.exists() else 'no such file'}")
    damage = (
        *(OSError, EOFError, ValueError, OverflowError, zlib.error, struct.error),
        *(KeyError, TypeError),  # from nibabel, for unknown data types and short files
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
        nibabel.freesurfer.mghformat.MGHError,
        nibabel.orientations.OrientationError,
    )
    try:
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
    except damage as error:
        why = " ".join(str(error).split())
        raise UnusableVolume(f"{path}: cannot be read, damaged or truncated ({why})") from error


def describe_grid_mismatch(t1: Volume, other: Volume) -> str | None:
    if t1.values.shape != other.values.shape:
        return f"has the shape {other.values.shape}, the T1 {t1.values.shape}"
    ends = [(0, length - 1) for length in t1.values.shape]
    corners = np.array(np.meshgrid(*ends, 1)).reshape(4, -1)
    distance = float(np.linalg.norm(((t1.affine - other.affine) @ corners)[:3], axis=0).max())
    if distance > AFFINE_TOLERANCE_MM:
        return f"has another affine than the T1: a corner lies {distance:.1f} mm apart"
    return None


def _read_header(path: Path) -> tuple[Any, Any]:
    """Return nibabel's header, without extensions, and the path of the file of voxel values."""
    # ``nibabel.load`` decompresses unneeded extensions of whatever length the file claims, and
    # skips as many values of .mgz; a few megabytes of gzip hold gigabytes of zeros.
    from nibabel import MGHImage, Nifti1Image, Nifti1Pair, Nifti2Image, Nifti2Pair

    start = None  # first bytes of the file, which show its kind
    for kind in (Nifti1Pair, Nifti1Image, Nifti2Pair, Nifti2Image):
        is_kind, start = kind.path_maybe_image(path, start)
        if is_kind:
            files = kind.filespec_to_file_map(path)
            with files["header" if "header" in files else "image"].get_prepare_fileobj() as file:
                header = kind.header_class(file.read(kind.header_class.sizeof_hdr))
            if not 0 <= (offset := header.get_data_offset()) <= MAX_HEADER:
                found = f"its values begin at byte {offset:,}"
                raise UnusableVolume(f"{path}: {found}; allowed: up to {MAX_HEADER:,}")
            return header, files["image"].filename
    if not MGHImage.path_maybe_image(path)[0]:
        raise UnusableVolume(f"{path}: neither NIfTI nor .mgz, or damaged")
    surfer: Any = MGHImage.filespec_to_file_map(path)["image"]
    with surfer.get_prepare_fileobj() as file:
        shape = struct.unpack(">4i", file.read(20)[4:])
        if math.prod(shape) > MAX_VOXELS:
            raise UnusableVolume(f"{path}: {_format_voxel_refusal(shape)}")
        file.seek(0)
        return MGHImage.header_class.from_fileobj(file), path


def _format_voxel_refusal(shape: Sequence[int]) -> str:
    return f"has the shape {tuple(shape)}; allowed: up to {MAX_VOXELS:,} voxels"


def _header_problem(header: Any) -> str | None:
    """Describe an invalid shape, data type or orientation in a header; None if all are valid."""
    shape = header.get_data_shape()
    if len(shape) < 3 or min(shape) < 1 or any(length != 1 for length in shape[3:]):
        return f"has the shape {shape}; allowed: one 3-D volume"
    if math.prod(shape) > MAX_VOXELS:
        return _format_voxel_refusal(shape)
    if header.get_data_dtype().kind not in REAL_NUMBER_KINDS:
        return f"its values are {header.get_data_dtype()}; allowed: whole and real numbers"
    if header.get("sform_code", 1) == 0 and header.get("qform_code", 1) == 0:
        return "says no orientation (sform_code and qform_code are 0): left and right are unknown"
    if not abs(np.linalg.det(header.get_best_affine()[:3, :3])) >= 1e-6:  # also true for NaN
        return "its affine is singular or has values that are no numbers"
    return None


TILE_SIDE = 16  # voxels: cubes of this side tile every stored volume
FWHM_TO_SD = 2 * np.sqrt(2 * np.log(2))
VOXEL_TOLERANCE_MM = 1e-3  # voxel sizes that differ less count as equal


class VoxelGrid(Config):
    """Settings of the voxel grid of all stored volumes, on RAS axes."""

    voxel_mm: float = Field(3.0, gt=0, le=20, description="Voxel side, mm; volumes are resampled")
    size: tuple[int, int, int] = Field(
        (64, 64, 64), description="Right, anterior, superior, in voxels; multiples of 16"
    )

    @model_validator(mode="after")
    def _check_size_tiled(self) -> Self:
        if any(length <= 0 or length % TILE_SIDE for length in self.size):
            raise ValueError(
                f"size is {list(self.size)}; "
                f"allowed: multiples of {TILE_SIDE}, so that cubes of {TILE_SIDE}³ tile the volume"
            )
        return self


def resample_volume(volume: np.ndarray, zooms: tuple[float, ...], voxel_mm: float) -> np.ndarray:
    """Resample a volume with voxel sizes ``zooms`` (mm) linearly to ``voxel_mm``, fp32."""
    factors = voxel_mm / np.asarray(zooms, np.float64)  # old voxels per new one
    if np.all(np.abs(factors - 1) * voxel_mm < VOXEL_TOLERANCE_MM):
        return volume.astype(np.float32, copy=False)
    # The old grid counts as already smoothed with a FWHM of one voxel.
    smoothing = np.sqrt(np.maximum(factors**2 - 1, 0)) / FWHM_TO_SD
    smooth = scipy.ndimage.gaussian_filter(volume.astype(np.float32), smoothing, mode="constant")
    shape = tuple(int(length) for length in np.ceil(np.array(volume.shape) / factors - 1e-6))
    offset = (np.array(volume.shape) - 1) / 2 - factors * (np.array(shape) - 1) / 2
    return scipy.ndimage.affine_transform(
        smooth, factors, offset, shape, order=1, mode="constant", output=np.float32
    )


def resample_masked_volume(
    volume: np.ndarray, mask: np.ndarray, zooms: tuple[float, ...], voxel_mm: float
) -> tuple[np.ndarray, np.ndarray]:
    """Resample a volume and its mask to voxels of ``voxel_mm``; values outside the mask are 0."""
    weight = resample_volume(mask.astype(np.float32), zooms, voxel_mm)
    values = resample_volume(np.where(mask, volume, 0), zooms, voxel_mm)
    inside = weight >= BRAIN_SHARE
    return np.where(inside, values / np.maximum(weight, BRAIN_SHARE), 0).astype(np.float32), inside


def unclipped_window_start(mask: np.ndarray, size: tuple[int, int, int]) -> tuple[int, ...]:
    """Return a window's first index per axis, centred on the mask; negative if it needs padding."""
    if mask.shape == tuple(size):
        return (0, 0, 0)
    bounds = [np.flatnonzero(mask.any(axis=axes))[[0, -1]] for axes in ((1, 2), (0, 2), (0, 1))]
    middles = [int(low + high + 1) // 2 for low, high in bounds]
    return tuple(middle - length // 2 for middle, length in zip(middles, size, strict=True))


def cut_window(volume: np.ndarray, start: tuple[int, ...], size: tuple[int, ...]) -> np.ndarray:
    """Cut a window of ``size`` voxels at ``start`` from a volume (D, H, W), padded with zeros."""
    axes = list(zip(start, size, volume.shape, strict=True))
    padded = np.pad(volume, [(max(-at, 0), max(at + n - length, 0)) for at, n, length in axes])
    return padded[tuple(slice(max(at, 0), max(at, 0) + n) for at, n, _ in axes)]


# possible shares of the head
POSSIBLE_SHARES = {"wm": (0.1, 0.7), "gm": (0.15, 0.85), "csf": (0.0, 0.7)}
HEAD_ML = (500, 3000)  # tissue and fluid in an adult's head, with room for any segmentation
SHARE_TOLERANCE = 0.02  # a tissue share may lie this far outside 0 to 1
SUM_TOLERANCE = 0.1  # a voxel's shares may sum to 1 plus this
MAX_OVERFULL_SHARE = 0.01  # share of voxels that may exceed that sum
BRIGHT_THRESHOLD = 0.1  # voxels above this × the brain's 99th percentile count as bright
MAX_BRIGHT_OUTSIDE = 0.15  # bright voxels outside the tissue, relative to the brain
MAX_FILLED_SHARE = 0.7  # share of voxels that a stripped brain may fill
MAX_LOST_BRAIN_SHARE = 0.01  # share of the brain that a crop may lose


def describe_impossible_tissue(regions: np.ndarray, voxel_ml: float) -> str | None:
    """Describe why tissue shares fp32 (3, D, H, W) cannot be those of a head; None if they can."""
    total = regions.sum(axis=0)
    if (over := float((total > 1 + SUM_TOLERANCE).mean())) > MAX_OVERFULL_SHARE:
        return f"tissue shares sum to more than 1 in {over:.1%} of voxels (up to {total.max():.2f})"
    head = float(total.sum(dtype=np.float64)) * voxel_ml
    if not HEAD_ML[0] <= head <= HEAD_ML[1]:
        return f"the tissue maps hold {head:.0f} mL; possible: {HEAD_ML[0]} to {HEAD_ML[1]} mL"
    if wrong := list_tissues_past_limits(regions, POSSIBLE_SHARES):
        shares = POSSIBLE_SHARES.items()
        limits = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in shares)
        return f"tissue fractions are impossible: {wrong}; possible: {limits}"
    return None


def describe_visible_skull(volume: np.ndarray, mask: np.ndarray, from_maps: bool) -> str | None:
    """Describe a visible skull, or None; from_maps: whether ``mask`` is from tissue maps."""
    remedy = "strip the skull, or give a brain mask (`mask`)"
    if not mask.any():
        return "there is no brain in it (no voxel inside the mask)"
    if not from_maps:
        if (share := float(mask.mean())) <= MAX_FILLED_SHARE:
            return None
        return f"not skull-stripped: {share:.0%} of its voxels are above 0; {remedy}"
    bright = volume > BRIGHT_THRESHOLD * np.percentile(volume[mask], 99)
    outside = (bright & ~scipy.ndimage.binary_dilation(mask, iterations=2)).sum() / mask.sum()
    if outside <= MAX_BRIGHT_OUTSIDE:
        return None
    return f"not skull-stripped: bright voxels outside tissue: {outside:.0%} of the brain; {remedy}"


class VolumeWithTissueShares(NamedTuple):
    image: np.ndarray  # float16 (1, D, H, W) in [0, 1]
    regions: np.ndarray | None  # uint8 (3, D, H, W), share × 255


def read_subject_volumes(
    files: Mapping[str, Path], grid: VoxelGrid, labels: Mapping[str, tuple[int, ...]] | None = None
) -> VolumeWithTissueShares:
    """Read a subject's files; return volume and tissue shares on the grid, normalised."""
    # files: "t1", perhaps "mask", and tissue either as maps ("wm", "gm", "csf"), or as one label
    # map ("dseg") whose numbers are the ``labels`` of each region, or neither. Brain: the mask
    # file, else voxels with more than half tissue, else T1 > 0 (skull-stripped).
    volumes = _load_matching_volumes(files)
    t1 = volumes["t1"]
    regions = None  # tissue shares fp32 (3, D, H, W)
    if labels is not None:
        numbers = np.rint(volumes["dseg"].values)
        regions = np.stack([np.isin(numbers, labels[name]) for name in TISSUES]).astype(np.float32)
    elif "wm" in volumes:
        regions = np.stack([volumes[name].values for name in TISSUES])
    if regions is not None:
        first, *rest = [path for name, path in files.items() if name not in ("t1", "mask")]
        place = ", ".join([str(first), *(path.name for path in rest)])
        _refuse(place, describe_impossible_tissue(regions, float(np.prod(t1.zooms)) / 1000))
    if "mask" in volumes:
        mask = volumes["mask"].values > BRAIN_SHARE
    else:
        mask = t1.values > 0 if regions is None else regions.sum(axis=0) > BRAIN_SHARE
        _refuse(files["t1"], describe_visible_skull(t1.values, mask, regions is not None))
    return _pack_on_grid(files["t1"], t1, regions, mask, grid)


def read_volume(path: str | Path, grid: VoxelGrid, mask: str | Path | None = None) -> np.ndarray:
    """Read a T1-weighted volume in the form that models take: float16 (1, D, H, W) in [0, 1]."""
    files = {"t1": Path(path)} | ({"mask": Path(mask)} if mask else {})
    return read_subject_volumes(files, grid).image


def normalise_intensities(volume: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Map percentiles 1 to 99 inside ``mask`` to [0.01, 1], clipped, fp32 (D, H, W); 0 outside."""
    inside = volume[mask].astype(np.float64)
    low, high = np.percentile(inside, PERCENTILES)
    if not high > low:
        raise ValueError(f"all intensities inside the brain are {low:g}")
    image = np.zeros(volume.shape, np.float32)
    shares = np.clip((inside - low) / (high - low), 0, 1)
    image[mask] = MIN_BRIGHTNESS + (1 - MIN_BRIGHTNESS) * shares
    return image


def normalise_and_pack(
    volume: np.ndarray, regions: np.ndarray | None, mask: np.ndarray
) -> VolumeWithTissueShares:
    """Normalise a volume (D, H, W), and convert it and tissue shares (R, D, H, W) for storage."""
    image = normalise_intensities(volume, mask).astype(np.float16)[None]
    if regions is not None:
        regions = np.rint(np.clip(regions, 0, 1) * 255).astype(np.uint8)
    return VolumeWithTissueShares(image, regions)


def _refuse(place: str | Path, problem: str | None) -> None:
    if problem:
        raise UnusableVolume(f"{place}: {problem}")


def _load_matching_volumes(files: Mapping[str, Path]) -> dict[str, Volume]:
    """Load files; return kind (t1, mask, …) → volume; UnusableVolume lists all problems."""
    volumes = {}
    problems = []
    for name, path in files.items():
        try:
            volumes[name] = load_volume(path)
        except UnusableVolume as error:
            problems.append(str(error))
    if not problems:
        for name, volume in volumes.items():
            why = describe_grid_mismatch(volumes["t1"], volume)
            if why is None and name in TISSUES:
                low, high = float(volume.values.min()), float(volume.values.max())
                if low < -SHARE_TOLERANCE or high > 1 + SHARE_TOLERANCE:
                    why = f"tissue shares run from {low:.2f} to {high:.2f}; allowed: 0 to 1"
            if why:
                problems.append(f"{files[name]}: {why}")
    if problems:
        raise UnusableVolume(*problems)
    return volumes


def _pack_on_grid(
    path: Path, t1: Volume, regions: np.ndarray | None, mask: np.ndarray, grid: VoxelGrid
) -> VolumeWithTissueShares:
    sides = np.multiply(t1.values.shape, t1.zooms)
    if (number := np.maximum(sides / grid.voxel_mm, 1).prod()) > MAX_VOXELS:
        raise UnusableVolume(
            f"{path}: is {' × '.join(f'{side:,.0f}' for side in sides)} mm large, {number:,.0f} "
            f"voxels of {grid.voxel_mm:g} mm; allowed: up to {MAX_VOXELS:,}; cut it, or use a "
            "larger `voxel_mm`"
        )
    volume, inside = resample_masked_volume(t1.values, mask, t1.zooms, grid.voxel_mm)
    if not inside.any():
        raise UnusableVolume(f"{path}: the brain mask is empty")
    start = unclipped_window_start(inside, grid.size)
    window_mask = cut_window(inside, start, grid.size)
    if (lost := 1 - float(window_mask.sum()) / float(inside.sum())) > MAX_LOST_BRAIN_SHARE:
        raise UnusableVolume(
            f"{path}: {lost:.1%} of the brain lies outside {'×'.join(map(str, grid.size))} voxels; "
            "use a larger `size` or `voxel_mm`"
        )
    if regions is not None:
        parts = [resample_volume(part, t1.zooms, grid.voxel_mm) for part in regions]
        regions = np.stack([cut_window(part, start, grid.size) for part in parts])
    try:
        return normalise_and_pack(cut_window(volume, start, grid.size), regions, window_mask)
    except ValueError as error:
        raise UnusableVolume(f"{path}: {error}") from None

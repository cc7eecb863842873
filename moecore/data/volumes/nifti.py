"""One NIfTI or FreeSurfer (.mgz) file to an array in canonical orientation."""

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError

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

"""One NIfTI file to an array in canonical orientation."""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError

# two affines are the same where they put every corner of the volume closer than this
APART_MM = 0.1


class Unusable(Exception):
    """A volume that cannot be used; its text names the file and says why."""


class Volume(NamedTuple):
    """Values fp32 (D, H, W) with axes nearest to right, anterior, superior (RAS); voxel sizes in mm
    along them; affine (4, 4) to scanner mm.
    """

    values: np.ndarray
    zooms: tuple[float, ...]
    affine: np.ndarray


def load_volume(path: Path) -> Volume:
    """Read a NIfTI file whole and turn it to canonical axes (flips and swaps only, no
    interpolation).

    Raises Unusable on files that are missing, damaged or truncated, not 3-D, without an
    orientation, or with values that are no numbers; UserError where nibabel is not installed.
    """
    nibabel = _nibabel()
    try:
        image = nibabel.load(path)
        values = np.asarray(image.dataobj, dtype=np.float32)
    except FileNotFoundError:
        raise Unusable(f"{path}: no such file") from None
    except (
        OSError,
        EOFError,
        ValueError,
        zlib.error,
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
    ) as error:
        raise Unusable(f"{path}: cannot be read, damaged or truncated ({error})") from error
    _check(path, image, values)
    image = nibabel.as_closest_canonical(
        nibabel.Nifti1Image(values.reshape(values.shape[:3]), image.affine)
    )
    zooms = tuple(float(side) for side in np.linalg.norm(image.affine[:3, :3], axis=0))
    return Volume(np.ascontiguousarray(image.dataobj, dtype=np.float32), zooms, image.affine)


def same_place(one: Volume, other: Volume) -> str | None:
    """Why two volumes do not lie on the same voxels, or None where they do."""
    if one.values.shape != other.values.shape:
        return f"has the shape {other.values.shape}, the T1 {one.values.shape}"
    corners = np.array(np.meshgrid(*[(0, length - 1) for length in one.values.shape])).reshape(
        3, -1
    )
    corners = np.vstack([corners, np.ones(corners.shape[1])])
    apart = float(np.linalg.norm(((one.affine - other.affine) @ corners)[:3], axis=0).max())
    if apart > APART_MM:
        return f"has another affine than the T1: a corner lies {apart:.1f} mm apart"
    return None


def header_problem(path: Path) -> str | None:
    """Why a file is no volume, as far as its header says; None where nothing is wrong with it."""
    nibabel = _nibabel()
    try:
        _check_header(path, nibabel.load(path))
    except Unusable as error:
        return str(error)
    except (
        OSError,
        EOFError,
        ValueError,
        zlib.error,
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
    ) as error:
        return f"{path}: cannot be read, damaged or truncated ({error})"
    return None


def _check(path: Path, image: Any, values: np.ndarray) -> None:
    _check_header(path, image)
    if not np.isfinite(values).all():
        raise Unusable(
            f"{path}: {int((~np.isfinite(values)).sum())} voxels are no numbers (NaN or infinite)"
        )


def _check_header(path: Path, image: Any) -> None:
    """Shape, orientation and affine, which the header says."""
    if len(image.shape) < 3 or any(length != 1 for length in image.shape[3:]):
        raise Unusable(f"{path}: has the shape {image.shape}; allowed: one 3-D volume")
    if image.header.get("sform_code", 1) == 0 and image.header.get("qform_code", 1) == 0:
        raise Unusable(
            f"{path}: says no orientation (sform_code and qform_code are 0); left and right "
            "cannot be known"
        )
    if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-6:
        raise Unusable(f"{path}: its affine is singular or has values that are no numbers")


def _nibabel() -> Any:
    try:
        import nibabel
    except ImportError:
        raise UserError(
            "reading NIfTI files needs nibabel; install moecore with its dependencies again"
        ) from None
    return nibabel

"""One NIfTI file to an array in canonical orientation."""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# two affines are the same where they put every corner of the volume closer than this
APART_MM = 0.1
MOST = 512**3  # voxels: a head at 0.5 mm; their values take half a gigabyte
EDGES_MM = (0.01, 100.0)  # of a voxel
NUMBERS = "biuf"  # numpy's kinds that are real numbers; not complex ones, not colours


class UnusableVolume(Exception):
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
    orientation, or with values that are no numbers.
    """
    import nibabel  # a third of a second, for those who use it

    image = _open_nifti(path)
    with _raise_unusable(path):
        values = np.asarray(image.dataobj, dtype=np.float32)
    _check_values(path, values)
    image = nibabel.as_closest_canonical(
        nibabel.Nifti1Image(values.reshape(values.shape[:3]), image.affine)
    )
    zooms = tuple(float(side) for side in np.linalg.norm(image.affine[:3, :3], axis=0))
    return Volume(np.ascontiguousarray(image.dataobj, dtype=np.float32), zooms, image.affine)


def place_mismatch(one: Volume, other: Volume) -> str | None:
    """Return why two volumes do not lie on the same voxels, or None where they do."""
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


def _open_nifti(path: Path) -> Any:
    """Return nibabel's image of a file whose header says a volume; no value is read.

    Raises Unusable.
    """
    if not path.is_file():
        raise UnusableVolume(f"{path}: {'no file' if path.exists() else 'no such file'}")
    import nibabel

    with _raise_unusable(path):
        image: Any = nibabel.load(path)
        _check_header(path, image)
    return image


@contextmanager
def _raise_unusable(path: Path) -> Iterator[None]:
    """Raise Unusable, in a line, for all that nibabel raises on bad content."""
    import nibabel

    try:
        yield
    except (
        OSError,
        EOFError,
        ValueError,
        OverflowError,
        zlib.error,
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
    ) as error:
        why = " ".join(str(error).split())
        raise UnusableVolume(f"{path}: cannot be read, damaged or truncated ({why})") from error


def _check_values(path: Path, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise UnusableVolume(
            f"{path}: {int((~np.isfinite(values)).sum())} voxels are no numbers (NaN or infinite)"
        )


def _check_header(path: Path, image: Any) -> None:
    """Shape, kind of values, orientation and affine, which the header says."""
    shape = image.shape
    if len(shape) < 3 or min(shape) < 1 or any(length != 1 for length in shape[3:]):
        raise UnusableVolume(f"{path}: has the shape {shape}; allowed: one 3-D volume")
    if math.prod(shape) > MOST:
        raise UnusableVolume(f"{path}: has the shape {shape}; allowed: up to {MOST:,} voxels")
    if image.get_data_dtype().kind not in NUMBERS:
        given = f"its values are {image.get_data_dtype()}"
        raise UnusableVolume(f"{path}: {given}; allowed: whole and real numbers")
    if image.header.get("sform_code", 1) == 0 and image.header.get("qform_code", 1) == 0:
        raise UnusableVolume(
            f"{path}: says no orientation (sform_code and qform_code are 0); left and right "
            "cannot be known"
        )
    if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-6:
        raise UnusableVolume(f"{path}: its affine is singular or has values that are no numbers")
    edges = np.linalg.norm(image.affine[:3, :3], axis=0)
    if edges.min() < EDGES_MM[0] or edges.max() > EDGES_MM[1]:
        given = " × ".join(f"{edge:g}" for edge in edges)
        least, most = EDGES_MM
        raise UnusableVolume(f"{path}: voxels of {given} mm; allowed: {least:g} to {most:g}")

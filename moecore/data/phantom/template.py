"""The anatomy that every simulated person is made from: MNI152 tissue maps on a 64³ grid of 3 mm
(see template/NOTICE.md).

Made once by tools/build_template.py; its digest stands here, so that another template is other
code.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from moecore.core.files import UserError, file_checksum
from moecore.data.phantom.fields import SIDE, VOXEL_ML, VOXEL_MM, grid_points

FILE = Path(__file__).parent / "mni152" / "mni152_64.npz"
SHA256 = "868656a0af5c77b3ba04897af18c4efdd53ed9c75d25bdaad74661c87dfdb3e5"
# of the distance to the ventricles; below it the direction away from them is not clear and is made
# shorter
SMALLEST_SLOPE = 0.2

SKULL_MM = 20.0  # within this distance of the outer surface tissue gives way less and less


class Template(NamedTuple):
    """Volumes float32 (64, 64, 64); tissue as shares of a voxel.

    Lateral ventricles are filled with the tissue around them.
    """

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # around the brain and in the other ventricles
    distance: np.ndarray  # to the wall of the lateral ventricles, mm; negative inside
    away: np.ndarray  # (3, 64³) direction away from them, about length 1, falling to 0 at the skull
    region: np.ndarray  # int64 (n,): the voxels in which a head may lie, as flat indices
    thinning: np.ndarray  # how fast grey matter is lost at a place
    head_ml: float
    # of grey matter, white matter, lateral ventricles in the head
    shares: tuple[float, float, float]


@cache
def load_template() -> Template:
    """Load the template and derive what does not depend on the person.

    Raises UserError where its file is missing or not the one this code is for.
    """
    if not FILE.is_file() or file_checksum(FILE) != SHA256:
        raise UserError(
            f"{FILE}: missing, or not the template of this version; reinstall, or make it with "
            "tools/build_template.py"
        )
    with np.load(FILE, allow_pickle=False) as stored:
        brightness, grey, white, fluid = (
            stored[name].astype(np.float32) / 255
            for name in ("brightness", "grey", "white", "fluid")
        )
        distance = stored["distance"].astype(np.float32)
        origin = stored["origin_mm"]
    full = np.maximum(grey + white + fluid, 1)  # rounded to bytes they may add up to 1.006
    return complete_template(brightness, grey / full, white / full, fluid / full, distance, origin)


def complete_template(
    brightness: np.ndarray,
    grey: np.ndarray,
    white: np.ndarray,
    fluid: np.ndarray,
    distance: np.ndarray,
    origin: np.ndarray,
) -> Template:
    """An anatomy with what follows from its maps.

    Maps and distance float32 (64, 64, 64), as in Template; origin: where voxel (0, 0, 0) lies, (3,)
    in mm.
    """
    head = grey + white + fluid
    slope = np.stack(np.gradient(distance, VOXEL_MM))
    # the skull does not move
    depth = np.asarray(ndimage.distance_transform_edt(head > 0.5))
    give = np.clip(depth * VOXEL_MM / SKULL_MM, 0, 1)
    steepness = np.maximum(np.linalg.norm(slope, axis=0), SMALLEST_SLOPE)
    away = (give * slope / steepness).astype(np.float32).reshape(3, -1)
    region = np.flatnonzero(ndimage.binary_dilation(head > 0.02, iterations=3))
    thinning = _thinning(origin)
    head_ml = float(head.sum()) * VOXEL_ML
    shares = _shares(grey, white, level_set(0.0, distance), head)
    maps = (brightness, grey, white, fluid)
    return Template(*maps, distance, away, region, thinning, head_ml, shares)


def _shares(
    grey: np.ndarray, white: np.ndarray, ventricles: np.ndarray, head: np.ndarray
) -> tuple[float, float, float]:
    """Return the shares of grey and white matter and open ventricles in the head."""
    whole = head.sum()
    outside = 1 - ventricles
    return (
        float((grey * outside).sum() / whole),
        float((white * outside).sum() / whole),
        float(ventricles.sum() / whole),
    )


def level_set(offset: float, distance: np.ndarray) -> np.ndarray:
    """Share of each voxel inside the ventricles when their wall is moved outwards by ``offset`` mm:
    one voxel of partial volume at the wall.
    """
    return np.clip(0.5 + (offset - distance) / VOXEL_MM, 0, 1)


def _thinning(origin: np.ndarray) -> np.ndarray:
    """Return where grey matter is lost first: more at the front and around the lateral sulci, less
    in the cerebellum (a choice of this simulation).
    """
    # mm in MNI space
    x, y, z = grid_points() * np.float32(VOXEL_MM) + origin.astype(np.float32)[:, None]
    front = 0.6 / (1 + np.exp(-(y + 5) / 12))
    sides = 0.5 * np.exp(-(((abs(x) - 45) / 14) ** 2 + ((y + 10) / 28) ** 2 + ((z - 2) / 18) ** 2))
    cerebellum = 0.3 * np.exp(-(((y + 62) / 18) ** 2 + ((z + 32) / 14) ** 2))
    return (0.7 + front + sides - cerebellum).astype(np.float32).reshape(SIDE, SIDE, SIDE)

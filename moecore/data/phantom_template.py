"""The anatomy that every simulated person is made from: MNI152 tissue maps on a 64³ grid of 3 mm (see template/NOTICE.md).

Made once by tools/build_template.py; its digest stands here, so that another template is other code.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from moecore.data.checksum import checksum
from moecore.data.phantom_fields import SIDE, VOXEL_ML, VOXEL_MM, grid_points
from moecore.files import StageError

FILE = Path(__file__).parent / "template" / "mni152_64.npz"
SHA256 = "868656a0af5c77b3ba04897af18c4efdd53ed9c75d25bdaad74661c87dfdb3e5"
SMALLEST_SLOPE = 0.2  # of the distance to the ventricles; below it the direction away from them is not clear and is made shorter

SKULL_MM = 20.0  # within this distance of the outer surface tissue gives way less and less


class Template(NamedTuple):
    """Volumes float32 (64, 64, 64); tissue as shares of a voxel. Lateral ventricles are filled with the tissue around them."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # around the brain and in the other ventricles
    distance: np.ndarray  # to the wall of the lateral ventricles, mm; negative inside
    away: np.ndarray  # (3, 64³) direction away from them, about length 1, falling to 0 at the skull
    region: np.ndarray  # int64 (n,): the voxels in which a head may lie, as flat indices
    thinning: np.ndarray  # how fast grey matter is lost at a place
    head_ml: float
    shares: tuple[float, float, float]  # of grey matter, white matter, lateral ventricles in the head


@cache
def template() -> Template:
    """Load the template and derive what does not depend on the person; StageError where its file is missing or not the one this code is for."""
    if not FILE.is_file() or checksum(FILE) != SHA256:
        raise StageError(f"{FILE}: missing, or not the template of this version; reinstall, or make it with tools/build_template.py")
    with np.load(FILE, allow_pickle=False) as stored:
        brightness, grey, white, fluid = (stored[name].astype(np.float32) / 255 for name in ("brightness", "grey", "white", "fluid"))
        distance, origin = stored["distance"].astype(np.float32), stored["origin_mm"]
    full = np.maximum(grey + white + fluid, 1)  # rounded to bytes they may add up to 1.006
    grey, white, fluid = grey / full, white / full, fluid / full
    head = grey + white + fluid
    slope = np.stack(np.gradient(distance, VOXEL_MM))
    give = np.clip(ndimage.distance_transform_edt(head > 0.5) * VOXEL_MM / SKULL_MM, 0, 1)  # the skull does not move
    away = (give * slope / np.maximum(np.linalg.norm(slope, axis=0), SMALLEST_SLOPE)).astype(np.float32).reshape(3, -1)
    region = np.flatnonzero(ndimage.binary_dilation(head > 0.02, iterations=3))
    open_ventricles = level_set(0.0, distance)
    volumes = [(grey * (1 - open_ventricles)).sum(), (white * (1 - open_ventricles)).sum(), open_ventricles.sum()]
    shares = tuple(float(volume / head.sum()) for volume in volumes)
    return Template(brightness, grey, white, fluid, distance, away, region, _thinning(origin), float(head.sum()) * VOXEL_ML, shares)


def level_set(offset: float, distance: np.ndarray) -> np.ndarray:
    """Share of each voxel inside the ventricles when their wall is moved outwards by ``offset`` mm: one voxel of partial volume at the wall."""
    return np.clip(0.5 + (offset - distance) / VOXEL_MM, 0, 1)


def _thinning(origin: np.ndarray) -> np.ndarray:
    """Where grey matter is lost first: more at the front and around the lateral sulci, less in the cerebellum (a choice of this simulation)."""
    x, y, z = grid_points() * np.float32(VOXEL_MM) + origin.astype(np.float32)[:, None]  # mm in MNI space
    front = 0.6 / (1 + np.exp(-(y + 5) / 12))
    sides = 0.5 * np.exp(-(((abs(x) - 45) / 14) ** 2 + ((y + 10) / 28) ** 2 + ((z - 2) / 18) ** 2))
    cerebellum = 0.3 * np.exp(-(((y + 62) / 18) ** 2 + ((z + 32) / 14) ** 2))
    return (0.7 + front + sides - cerebellum).astype(np.float32).reshape(SIDE, SIDE, SIDE)

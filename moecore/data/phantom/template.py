"""The anatomy of every simulated person, MNI152 maps at 64³ (see mni152/NOTICE.md), and its pose.

tools/build_template.py made the maps; their digest is here, so other maps are other code.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from scipy import ndimage

from moecore.core.files import UserError, file_checksum
from moecore.data.phantom import anatomy
from moecore.data.phantom.anatomy import (
    SIDE,
    VOXEL_ML,
    VOXEL_MM,
    grid_points,
    interpolate_volume,
    smooth_fields,
)

FILE = Path(__file__).parent / "mni152" / "mni152_64.npz"
SHA256 = "868656a0af5c77b3ba04897af18c4efdd53ed9c75d25bdaad74661c87dfdb3e5"
# of the distance to the ventricles; below it the direction away from them is not clear and is made
# shorter
SMALLEST_SLOPE = 0.2
SKULL_MM = 20.0  # within this distance of the outer surface tissue gives way less and less
# the voxels that may become ventricle, and how far its wall may move
NEAR_MM = 45.0
WALL = (-6.0, 40.0)
BISECTIONS = 22  # 46 mm / 2^22: the wall's place is exact to 1e-5 mm


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
    shares: tuple[float, ...]  # of grey matter, white matter, lateral ventricles in the head


class Pose(NamedTuple):
    """A head: proportions (3,), rotation (3, 3), shift (3,), displacement (3, 64³), voxels."""

    shape: np.ndarray
    rotation: np.ndarray
    shift: np.ndarray
    warp: np.ndarray


class PlacedTemplate(NamedTuple):
    """The template in a head: maps float32 (64, 64, 64)."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # without the lateral ventricles
    ventricles: np.ndarray
    caps: np.ndarray  # 1 at the ventricles, falling off outwards


@cache
def load_template() -> Template:
    """Load the template and derive what does not depend on the person.

    Raises UserError where its file is missing or not the one this code is for.
    """
    if not FILE.is_file() or file_checksum(FILE) != SHA256:
        raise UserError(f"{FILE}: missing, or not the template of this version; reinstall")
    with np.load(FILE, allow_pickle=False) as stored:
        brightness, grey, white, fluid = (
            stored[name].astype(np.float32) / 255
            for name in ("brightness", "grey", "white", "fluid")
        )
        distance = stored["distance"].astype(np.float32)
        origin = stored["origin_mm"]
    full = np.maximum(grey + white + fluid, 1)  # rounded to bytes they may add up to 1.006
    return template_from_maps(brightness, grey / full, white / full, fluid / full, distance, origin)


def template_from_maps(
    brightness: np.ndarray,
    grey: np.ndarray,
    white: np.ndarray,
    fluid: np.ndarray,
    distance: np.ndarray,
    origin: np.ndarray,
) -> Template:
    """An anatomy with what follows from its maps.

    Maps and distance float32 (64, 64, 64), as in Template; origin: of voxel (0, 0, 0), (3,) mm.
    """
    head = grey + white + fluid
    slope = np.stack(np.gradient(distance, VOXEL_MM))
    # the skull does not move
    depth = np.asarray(ndimage.distance_transform_edt(head > 0.5))
    give = np.clip(depth * VOXEL_MM / SKULL_MM, 0, 1)
    steepness = np.maximum(np.linalg.norm(slope, axis=0), SMALLEST_SLOPE)
    away = (give * slope / steepness).astype(np.float32).reshape(3, -1)
    region = np.flatnonzero(ndimage.binary_dilation(head > 0.02, iterations=3))
    ventricles = ventricle_voxel_shares(0.0, distance)
    parts = (grey * (1 - ventricles), white * (1 - ventricles), ventricles)
    return Template(
        *(brightness, grey, white, fluid, distance, away, region),
        thinning=_thinning(origin),
        head_ml=float(head.sum()) * VOXEL_ML,
        shares=tuple(float(part.sum() / head.sum()) for part in parts),
    )


def ventricle_voxel_shares(offset: float, distance: np.ndarray) -> np.ndarray:
    """Share of each voxel inside the ventricles when their wall moves outwards ``offset`` mm."""
    return np.clip(0.5 + (offset - distance) / VOXEL_MM, 0, 1)


def _thinning(origin: np.ndarray) -> np.ndarray:
    """Where grey matter is lost first: the front and lateral sulci (this simulation's choice)."""
    # mm in MNI space
    x, y, z = grid_points() * np.float32(VOXEL_MM) + origin.astype(np.float32)[:, None]
    front = 0.6 / (1 + np.exp(-(y + 5) / 12))
    sides = 0.5 * np.exp(-(((abs(x) - 45) / 14) ** 2 + ((y + 10) / 28) ** 2 + ((z - 2) / 18) ** 2))
    cerebellum = 0.3 * np.exp(-(((y + 62) / 18) ** 2 + ((z + 32) / 14) ** 2))
    return (0.7 + front + sides - cerebellum).astype(np.float32).reshape(SIDE, SIDE, SIDE)


def draw_pose(random: Generator, warp_mm: float) -> Pose:
    """Draw a head's pose and shape; ``warp_mm``: SD of the smooth displacement."""
    shape = np.exp(random.normal(0, anatomy.SHAPE_LOG_SD, 3))
    angles = np.deg2rad(random.normal(0, anatomy.TILT_DEGREES_SD, 3))
    shift = random.normal(0, anatomy.SHIFT_MM_SD, 3) / VOXEL_MM
    warp = smooth_fields(random, 3).reshape(3, -1) * np.float32(warp_mm / VOXEL_MM)
    return Pose(shape / shape.prod() ** (1 / 3), rotation_matrix(angles), shift, warp)


def rotation_matrix(angles: np.ndarray) -> np.ndarray:
    """Rx · Ry · Rz, (3, 3), about the body's axes; angles (3,) in radians."""
    cx, cy, cz = np.cos(angles)
    sx, sy, sz = np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    return about_x @ about_y @ np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])


def place_template(
    base: Template, pose: Pose, scale: float, ventricle_voxels: float
) -> PlacedTemplate:
    """The template, ``scale`` times as large, in a pose, with these lateral ventricles."""
    region = base.region
    centre = (SIDE - 1) / 2
    back = (pose.rotation @ np.diag(1 / (pose.shape * scale))).astype(np.float32)
    points = back @ (grid_points()[:, region] - np.float32(centre)) + np.float32(centre)
    points += pose.warp[:, region] - pose.shift.astype(np.float32)[:, None]
    distance = interpolate_volume(base.distance, points)
    wall = ventricle_wall_offset(distance[distance < NEAR_MM], ventricle_voxels)
    inside = ventricle_voxel_shares(wall, distance)
    # a voxel shows the tissue that lay nearer to the ventricles before they grew
    voxels = np.clip(np.rint(points), 0, SIDE - 1).astype(np.int64)
    away = base.away[:, (voxels[0] * SIDE + voxels[1]) * SIDE + voxels[2]]
    push = wall * np.exp(-np.abs(distance) / anatomy.PUSH_DECAY_MM) / VOXEL_MM
    points -= push.astype(np.float32) * away
    brightness, grey, white, fluid = (
        _full(region, interpolate_volume(values, points) * (1 - inside))
        for values in (base.brightness, base.grey, base.white, base.fluid)
    )
    ventricles = _full(region, inside)
    caps = _full(region, np.exp(-np.maximum(distance - wall, 0) / anatomy.LESION_RIM_MM))
    ventricles *= grey + white + fluid + ventricles > 0.3  # not outside the head
    brightness = brightness + np.float32(anatomy.FLUID) * ventricles
    return PlacedTemplate(brightness, grey, white, fluid, ventricles, caps)


def ventricle_wall_offset(distance: np.ndarray, voxels: float) -> float:
    """Return how far (mm) the ventricles' wall moves to hold ``voxels``; distance: (n,) mm."""
    low, high = WALL
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if ventricle_voxel_shares(middle, distance).sum(dtype=np.float64) < voxels:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _full(region: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values (n,) at the flat indices ``region`` as a volume float32, 0 elsewhere."""
    volume = np.zeros(SIDE**3, np.float32)
    volume[region] = values
    return volume.reshape(SIDE, SIDE, SIDE)

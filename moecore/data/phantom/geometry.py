"""Placing the template into a simulated head: pose, smooth warp, and ventricles of a given
volume.
"""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from moecore.data.phantom.fields import SIDE, VOXEL_MM, grid_points, sample_volume, smooth_fields
from moecore.data.phantom.numbers import (
    FLUID,
    LESION_RIM_MM,
    PUSH_DECAY_MM,
    SHAPE_LOG_SD,
    SHIFT_MM_SD,
    TILT_DEGREES_SD,
)
from moecore.data.phantom.template import Template, level_set

# the voxels that may become ventricle, and how far its wall may move
NEAR_MM = 45.0
WALL = (-6.0, 40.0)
BISECTIONS = 22  # 46 mm / 2^22: the wall's place is exact to 1e-5 mm


class Pose(NamedTuple):
    """A person's head: proportions along the axes (3,), rotation (3, 3), shift in voxels (3,),
    displacement in voxels (3, 64³).
    """

    shape: np.ndarray
    rotation: np.ndarray
    shift: np.ndarray
    warp: np.ndarray


class Placement(NamedTuple):
    """The template in a head: maps float32 (64, 64, 64); ``wall`` is the distance from the
    ventricles' wall in mm.
    """

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # without the lateral ventricles
    ventricles: np.ndarray
    caps: np.ndarray  # 1 at the ventricles, falling off outwards


def draw_pose(random: Generator, warp_mm: float) -> Pose:
    """Draw a head's pose and shape; ``warp_mm``: SD of the smooth displacement."""
    shape = np.exp(random.normal(0, SHAPE_LOG_SD, 3))
    angles = np.deg2rad(random.normal(0, TILT_DEGREES_SD, 3))
    shift = random.normal(0, SHIFT_MM_SD, 3) / VOXEL_MM
    warp = smooth_fields(random, 3).reshape(3, -1) * np.float32(warp_mm / VOXEL_MM)
    return Pose(shape / shape.prod() ** (1 / 3), rotation_matrix(angles), shift, warp)


def rotation_matrix(angles: np.ndarray) -> np.ndarray:
    """Rotation about x, then y, then z axes of the body: Rx · Ry · Rz, (3, 3); angles (3,) in
    radians.
    """
    cx, cy, cz = np.cos(angles)
    sx, sy, sz = np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    return about_x @ about_y @ np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])


def place_template(base: Template, pose: Pose, scale: float, ventricle_voxels: float) -> Placement:
    """The template, ``scale`` times as large, in a pose, with lateral ventricles of
    ``ventricle_voxels``.
    """
    region = base.region
    centre = (SIDE - 1) / 2
    back = (pose.rotation @ np.diag(1 / (pose.shape * scale))).astype(np.float32)
    points = back @ (grid_points()[:, region] - np.float32(centre)) + np.float32(centre)
    points += pose.warp[:, region] - pose.shift.astype(np.float32)[:, None]
    distance = sample_volume(base.distance, points)
    wall = find_ventricle_wall(distance[distance < NEAR_MM], ventricle_voxels)
    inside = level_set(wall, distance)
    # a voxel shows the tissue that lay nearer to the ventricles before they grew
    voxels = np.clip(np.rint(points), 0, SIDE - 1).astype(np.int64)
    away = base.away[:, (voxels[0] * SIDE + voxels[1]) * SIDE + voxels[2]]
    push = wall * np.exp(-np.abs(distance) / PUSH_DECAY_MM) / VOXEL_MM
    points -= push.astype(np.float32) * away
    brightness, grey, white, fluid = (
        _full(region, sample_volume(values, points) * (1 - inside))
        for values in (base.brightness, base.grey, base.white, base.fluid)
    )
    ventricles = _full(region, inside)
    caps = _full(region, np.exp(-np.maximum(distance - wall, 0) / LESION_RIM_MM))
    ventricles *= grey + white + fluid + ventricles > 0.3  # not outside the head
    brightness = brightness + np.float32(FLUID) * ventricles
    return Placement(brightness, grey, white, fluid, ventricles, caps)


def find_ventricle_wall(distance: np.ndarray, voxels: float) -> float:
    """Return how far outwards (mm) the ventricles' wall is to move so that they hold ``voxels``;
    found by bisection. distance: (n,) mm.
    """
    low, high = WALL
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if level_set(middle, distance).sum(dtype=np.float64) < voxels:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _full(region: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values (n,) at the flat indices ``region`` as a volume float32, 0 elsewhere."""
    volume = np.zeros(SIDE**3, np.float32)
    volume[region] = values
    return volume.reshape(SIDE, SIDE, SIDE)

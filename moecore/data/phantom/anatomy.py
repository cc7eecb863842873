"""The anatomy of simulated heads: volumes by age (mL), random fields and the MNI152 template.

tools/build_template.py makes the maps at 64³ (mni152/NOTICE.md); new maps change their digest.
"""

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import scipy
from numpy.random import Generator

from moecore.core.files import UserError, file_checksum

Preset = Literal["demo", "realistic"]

# Population medians by age, women (Bethlehem et al. 2022, "Brain charts for the human lifespan",
# Nature 604: 525; evaluated from the published GAMLSS fits). Only their shape relative to age 25 is
# used; men's curves are proportional.
AGES = np.arange(20, 91, 5)
GREY_ML = np.array(
    [607.9, 587.9, 571.0, 556.5, 543.9, 532.8, 522.9, 514.1]
    + [506.1, 498.8, 492.1, 486.0, 480.3, 475.0, 470.1]
)
WHITE_ML = np.array(
    [442.4, 447.2, 448.0, 446.2, 442.9, 438.5, 433.5, 428.0]
    + [422.3, 416.4, 410.5, 404.5, 398.6, 392.7, 386.9]
)
VENTRICLES_ML = np.array(
    [10.94, 11.78, 12.87, 14.20, 15.79, 17.63, 19.76, 22.19]
    + [24.96, 28.11, 31.68, 35.70, 40.23, 45.33, 51.05]
)
INDEX_OF_25 = 1  # index of age 25 in AGES, the assumed age of the template

# Choices of this simulation, not published values
HEAD_ML = {"F": 1390.0, "M": 1580.0}  # median volume inside the skull
HEAD_LOG_SD = 0.085  # SD of its logarithm within a sex
MEN_VENTRICLE_FACTOR = 1.08  # men / women, at equal head size and age
# limits of the simulated brain age (age + gap)
MAX_BRAIN_AGE = 95.0
MIN_BRAIN_AGE = 18.0
HEAD_PROPORTIONS_LOG_SD = 0.025  # head proportions, along each axis
# residual pose after registration
TILT_DEGREES_SD = 1.5
SHIFT_MM_SD = 1.0
# decay length of the outward push of a larger ventricle on tissue
PUSH_DECAY_MM = 25.0
CORTEX_THINNING_LOG_SD = 0.25  # regional variation of cortical thinning

# Brightness on a T1-weighted image, as shares of the template's brightest tissue; lesions in white
# matter are darker by LESION_DARKER
GREY = 0.65
WHITE = 0.87
FLUID = 0.31
LESION_DARKER = 0.22
# caps around the ventricles, and spots where a smooth field is above LESION_SPOT_MIN
LESION_CAP_DECAY_MM = 5.0
LESION_SPOT_MIN = 0.9
LESION_SPOT_WEIGHT = 0.6
LESION_REFERENCE_HEAD_ML = 1450.0  # head volume for which lesions_ml is given

# Scanner and site
# SD of the logarithm of shading and of overall brightness, per scan
BIAS_LOG_SD = 0.06
SCAN_LOG_SD = 0.03
# per site: brightness, contrast, noise (SD at gain 1)
SITE_GAIN = (0.7, 1.4)
SITE_GAMMA_LOG_SD = 0.06
SITE_NOISE = (0.015, 0.03)


class PopulationSpread(NamedTuple):
    """Variation among people of one age and sex."""

    gap: float  # SD of brain age − age, years
    atrophy: float  # SD of the share of tissue replaced by fluid
    boundary: float  # SD of the shift between grey and white matter, as a share of white matter
    ventricles: float  # SD of the logarithm of the ventricles' volume
    lesions: float  # SD of the logarithm of the lesions' volume
    warp: float  # SD of the smooth displacement, mm


PRESETS: dict[str, PopulationSpread] = {
    "demo": PopulationSpread(3.0, 0.018, 0.05, 0.25, 0.5, 3.0),
    "realistic": PopulationSpread(4.0, 0.035, 0.08, 0.38, 0.7, 4.0),
}


def tissue_relative_to_25(medians: np.ndarray, age: float) -> float:
    """Return a tissue's volume at ``age`` relative to 25 years, from ``medians`` at AGES (mL)."""
    return float(np.interp(age, AGES, medians / medians[INDEX_OF_25]))


def ventricles_relative_to_25(age: float) -> float:
    return float(np.exp(np.interp(age, AGES, np.log(VENTRICLES_ML / VENTRICLES_ML[INDEX_OF_25]))))


def lesions_ml(age: float) -> float:
    """Return the volume of white-matter lesions at ``age`` in mL (our choice), 1.2 at 25."""
    return float(1.1 + 0.35 * np.exp((age - 50) / 14))  # the exponential doubles in 10 years


SIDE = 64  # voxels along each axis
VOXEL_MM = 3.0
VOXEL_ML = VOXEL_MM**3 / 1000
KNOTS = 8  # control points along each axis, about 38 mm apart
# SD of a cubic B-spline field whose control points have SD 1, measured over the grid
SPLINE_SD = 0.315


def spline_basis() -> np.ndarray:
    """Return KNOTS cubic B-splines at SIDE points, float32 (SIDE, KNOTS); rows sum to 1."""
    position = np.linspace(0, KNOTS - 3 - 1e-6, SIDE)
    first = np.floor(position).astype(int)
    t = position - first
    pieces = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    basis = np.zeros((SIDE, KNOTS), np.float32)
    for offset, piece in enumerate(pieces):
        basis[np.arange(SIDE), first + offset] = piece / 6
    return basis


BASIS = spline_basis()


def draw_smooth_fields(random: Generator, number: int = 1) -> np.ndarray:
    """Draw smooth Gaussian fields with SD near 1: float32 (number, 64, 64, 64)."""
    field = random.standard_normal((number, KNOTS, KNOTS, KNOTS), dtype=np.float32) @ BASIS.T
    field = np.matmul(BASIS, field)  # (n, 8, 64, 64)
    field = np.matmul(BASIS, field.reshape(number, KNOTS, SIDE * SIDE))
    return field.reshape(number, SIDE, SIDE, SIDE) / np.float32(SPLINE_SD)


def voxel_indices() -> np.ndarray:
    """Return the indices of all voxels, float32 (3, 64³), the last axis fastest."""
    return np.indices((SIDE, SIDE, SIDE), np.float32).reshape(3, -1)


def interpolate_volume(volume: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Interpolate a volume (64, 64, 64) linearly at points (3, n); return float32 (n,)."""
    return scipy.ndimage.map_coordinates(
        volume, points, order=1, mode="nearest", prefilter=False, output=np.float32
    )


def simulate_scanner(
    brightness: np.ndarray, mask: np.ndarray, seed: int, scan: int, site: int
) -> np.ndarray:
    """Apply a site's contrast, bias field and noise to a brain; return float32 (D, H, W)."""
    # streams of the person's scan and of the site, independent of the anatomy's
    random = np.random.default_rng([seed, 2, scan])
    scanner = np.random.default_rng([site, 77])
    gain = scanner.uniform(*SITE_GAIN)
    gamma = float(np.exp(scanner.normal(0, SITE_GAMMA_LOG_SD)))
    noise = scanner.uniform(*SITE_NOISE) * gain
    shading = np.exp(BIAS_LOG_SD * draw_smooth_fields(random)[0] + random.normal(0, SCAN_LOG_SD))
    real, imaginary = random.standard_normal((2, mask.sum()), dtype=np.float32) * np.float32(noise)
    signal = np.clip(brightness, 0, None) ** gamma * shading * gain
    image = np.zeros(brightness.shape, np.float32)
    image[mask] = np.hypot(signal[mask] + real, imaginary)
    return image


TEMPLATE_FILE = Path(__file__).parent / "mni152" / "mni152_64.npz"
TEMPLATE_SHA256 = "868656a0af5c77b3ba04897af18c4efdd53ed9c75d25bdaad74661c87dfdb3e5"
# Where the distance to the ventricles has a smaller slope, its gradient has no clear direction, and
# the vector away from them is shortened.
MIN_DISTANCE_SLOPE = 0.2
SKULL_DAMPING_MM = 20.0  # tissue nearer to the outer surface moves less, down to 0 at the surface
# largest distance at which a voxel may become ventricle, and range of the wall's offset, mm
MAX_VENTRICLE_DISTANCE_MM = 45.0
WALL_OFFSET_RANGE_MM = (-6.0, 40.0)
BISECTIONS = 22  # 46 mm / 2^22: the wall's position is exact to 1e-5 mm


class Template(NamedTuple):
    """An average head: maps float32 (64, 64, 64), lateral ventricles filled with tissue."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # around the brain and in the other ventricles
    distance: np.ndarray  # to the wall of the lateral ventricles, mm; negative inside
    away: np.ndarray  # (3, 64³) direction away from them, about length 1, falling to 0 at the skull
    region: np.ndarray  # int64 (n,): flat indices of the voxels that a head may occupy
    thinning: np.ndarray  # relative speed of grey matter loss
    head_ml: float
    shares: tuple[float, ...]  # of grey matter, white matter, lateral ventricles in the head


class Pose(NamedTuple):
    shape: np.ndarray  # (3,), proportions of the head
    rotation: np.ndarray  # (3, 3)
    shift: np.ndarray  # (3,), voxels
    warp: np.ndarray  # (3, 64³), displacement in voxels


class PlacedTemplate(NamedTuple):
    """The template transformed to a head: maps float32 (64, 64, 64)."""

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray  # without the lateral ventricles
    ventricles: np.ndarray
    caps: np.ndarray  # 1 at the ventricles, decaying outwards


@cache
def load_template() -> Template:
    """Return the template of the MNI152 maps; UserError if their file is missing or was changed."""
    if not TEMPLATE_FILE.is_file() or file_checksum(TEMPLATE_FILE) != TEMPLATE_SHA256:
        raise UserError(f"{TEMPLATE_FILE}: missing, or not the template of this version; reinstall")
    with np.load(TEMPLATE_FILE, allow_pickle=False) as stored:
        names = ("brightness", "grey", "white", "fluid")
        brightness, grey, white, fluid = (stored[name].astype(np.float32) / 255 for name in names)
        distance = stored["distance"].astype(np.float32)
        origin = stored["origin_mm"]
    full = np.maximum(grey + white + fluid, 1)  # shares rounded to bytes may add up to 1.006
    return template_from_maps(brightness, grey / full, white / full, fluid / full, distance, origin)


def template_from_maps(
    brightness: np.ndarray,
    grey: np.ndarray,
    white: np.ndarray,
    fluid: np.ndarray,
    distance: np.ndarray,
    origin: np.ndarray,
) -> Template:
    """Build the template from maps (64, 64, 64); ``origin`` (3,) is voxel 0 in MNI space, mm."""
    head = grey + white + fluid
    slope = np.stack(np.gradient(distance, VOXEL_MM))
    # the skull does not move
    depth = np.asarray(scipy.ndimage.distance_transform_edt(head > 0.5))
    mobility = np.clip(depth * VOXEL_MM / SKULL_DAMPING_MM, 0, 1)
    steepness = np.maximum(np.linalg.norm(slope, axis=0), MIN_DISTANCE_SLOPE)
    away = (mobility * slope / steepness).astype(np.float32).reshape(3, -1)
    region = np.flatnonzero(scipy.ndimage.binary_dilation(head > 0.02, iterations=3))
    ventricles = compute_inside_shares(0.0, distance)
    parts = (grey * (1 - ventricles), white * (1 - ventricles), ventricles)
    return Template(
        *(brightness, grey, white, fluid, distance, away, region),
        thinning=_grey_loss_speed_map(origin),
        head_ml=float(head.sum()) * VOXEL_ML,
        shares=tuple(float(part.sum() / head.sum()) for part in parts),
    )


def compute_inside_shares(offset: float, distance: np.ndarray) -> np.ndarray:
    """Return voxel shares inside a surface moved ``offset`` mm out; distance: mm to the old one."""
    return np.clip(0.5 + (offset - distance) / VOXEL_MM, 0, 1)


def _grey_loss_speed_map(origin: np.ndarray) -> np.ndarray:
    """Return the relative speed of grey matter loss (64, 64, 64): highest at front and sides."""
    # mm in MNI space
    x, y, z = voxel_indices() * np.float32(VOXEL_MM) + origin.astype(np.float32)[:, None]
    front = 0.6 / (1 + np.exp(-(y + 5) / 12))
    sides = 0.5 * np.exp(-(((abs(x) - 45) / 14) ** 2 + ((y + 10) / 28) ** 2 + ((z - 2) / 18) ** 2))
    cerebellum = 0.3 * np.exp(-(((y + 62) / 18) ** 2 + ((z + 32) / 14) ** 2))
    return (0.7 + front + sides - cerebellum).astype(np.float32).reshape(SIDE, SIDE, SIDE)


def draw_pose(random: Generator, warp_mm: float) -> Pose:
    shape = np.exp(random.normal(0, HEAD_PROPORTIONS_LOG_SD, 3))
    angles = np.deg2rad(random.normal(0, TILT_DEGREES_SD, 3))
    cx, cy, cz = np.cos(angles)
    sx, sy, sz = np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    shift = random.normal(0, SHIFT_MM_SD, 3) / VOXEL_MM
    warp = draw_smooth_fields(random, 3).reshape(3, -1) * np.float32(warp_mm / VOXEL_MM)
    return Pose(shape / shape.prod() ** (1 / 3), about_x @ about_y @ about_z, shift, warp)


def place_template(
    base: Template, pose: Pose, scale: float, ventricle_voxels: float
) -> PlacedTemplate:
    """Transform the template to a pose and scale; ventricles get ``ventricle_voxels`` voxels."""
    region = base.region
    centre = (SIDE - 1) / 2
    back = (pose.rotation @ np.diag(1 / (pose.shape * scale))).astype(np.float32)
    points = back @ (voxel_indices()[:, region] - np.float32(centre)) + np.float32(centre)
    points += pose.warp[:, region] - pose.shift.astype(np.float32)[:, None]
    distance = interpolate_volume(base.distance, points)
    wall = ventricle_wall_offset(distance[distance < MAX_VENTRICLE_DISTANCE_MM], ventricle_voxels)
    inside = compute_inside_shares(wall, distance)
    # A voxel shows the tissue that was nearer to the ventricles before they grew.
    voxels = np.clip(np.rint(points), 0, SIDE - 1).astype(np.int64)
    away = base.away[:, (voxels[0] * SIDE + voxels[1]) * SIDE + voxels[2]]
    push = wall * np.exp(-np.abs(distance) / PUSH_DECAY_MM) / VOXEL_MM
    points -= push.astype(np.float32) * away
    brightness, grey, white, fluid = (
        _scatter_to_volume(region, interpolate_volume(values, points) * (1 - inside))
        for values in (base.brightness, base.grey, base.white, base.fluid)
    )
    ventricles = _scatter_to_volume(region, inside)
    caps = _scatter_to_volume(region, np.exp(-np.maximum(distance - wall, 0) / LESION_CAP_DECAY_MM))
    ventricles *= grey + white + fluid + ventricles > 0.3  # not outside the head
    brightness = brightness + np.float32(FLUID) * ventricles
    return PlacedTemplate(brightness, grey, white, fluid, ventricles, caps)


def ventricle_wall_offset(distance: np.ndarray, voxels: float) -> float:
    """Return the offset of ``compute_inside_shares`` (mm) at which the shares sum to ``voxels``."""
    low, high = WALL_OFFSET_RANGE_MM
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if compute_inside_shares(middle, distance).sum(dtype=np.float64) < voxels:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _scatter_to_volume(region: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a volume float32 with ``values`` (n,) at the flat indices ``region``, 0 elsewhere."""
    volume = np.zeros(SIDE**3, np.float32)
    volume[region] = values
    return volume.reshape(SIDE, SIDE, SIDE)

"""Every number of the simulated ageing cohort (`phantom`), with its source.

Volumes in mL, lengths in mm, ages in years.
"""

from typing import Literal, NamedTuple

import numpy as np

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
REFERENCE = 1  # index of age 25 in AGES: the template is taken to be of that age

# Choices of this simulation, not published values
HEAD_ML = {"F": 1390.0, "M": 1580.0}  # median volume inside the skull
HEAD_LOG_SD = 0.085  # SD of its logarithm within a sex
VENTRICLES_OF_MEN = 1.08  # times those of women, at equal head size and age
# limits of the brain age that is simulated (age + gap)
OLDEST = 95.0
YOUNGEST = 18.0
SHAPE_LOG_SD = 0.025  # head proportions, along each axis
# what remains of the pose after registration
TILT_DEGREES_SD = 1.5
SHIFT_MM_SD = 1.0
# a larger ventricle pushes tissue outwards; the push falls off over this distance
PUSH_DECAY_MM = 25.0
CORTEX_LOG_SD = 0.25  # regional variation of cortical thinning

# Brightness on a T1-weighted image, as shares of the template's brightest tissue; lesions in white
# matter are darker by LESION_DARKER
GREY = 0.65
WHITE = 0.87
FLUID = 0.31
LESION_DARKER = 0.22
# caps around the ventricles, and spots where a smooth field is above LESION_SPOT
LESION_RIM_MM = 5.0
LESION_SPOT = 0.9
LESION_SPOT_WEIGHT = 0.6
LESION_HEAD_ML = 1450.0  # the head volume that lesions_ml is for

# Scanner and site
# smooth shading and overall brightness of one scan
BIAS = 0.06
SCAN_LOG_SD = 0.03
# of one site: brightness, contrast, noise (SD at gain 1)
SITE_GAIN = (0.7, 1.4)
SITE_GAMMA_LOG_SD = 0.06
SITE_NOISE = (0.015, 0.03)


class PopulationSpread(NamedTuple):
    """How much people of one age and sex differ."""

    gap: float  # SD of brain age − age, years
    atrophy: float  # SD of the share of tissue that has become fluid
    boundary: float  # SD of the shift between grey and white matter, as a share of white matter
    ventricles: float  # SD of the logarithm of the ventricles' volume
    lesions: float  # SD of the logarithm of the lesions' volume
    warp: float  # SD of the smooth displacement, mm


PRESETS: dict[str, PopulationSpread] = {
    "demo": PopulationSpread(3.0, 0.018, 0.05, 0.25, 0.5, 3.0),
    "realistic": PopulationSpread(4.0, 0.035, 0.08, 0.38, 0.7, 4.0),
}


def grey_matter_relative_to_25(age: float) -> float:
    """Grey matter at an age, relative to age 25; linear between the medians."""
    return float(np.interp(age, AGES, GREY_ML / GREY_ML[REFERENCE]))


def white_matter_relative_to_25(age: float) -> float:
    """White matter at an age, relative to age 25; linear between the medians."""
    return float(np.interp(age, AGES, WHITE_ML / WHITE_ML[REFERENCE]))


def ventricles_relative_to_25(age: float) -> float:
    """Lateral ventricles at an age, relative to age 25; their logarithm is linear in between."""
    return float(np.exp(np.interp(age, AGES, np.log(VENTRICLES_ML / VENTRICLES_ML[REFERENCE]))))


def lesions_ml(age: float) -> float:
    """White-matter lesions (mL), a choice: about 1 when young, later doubling every 10 years."""
    return float(1.1 + 0.35 * np.exp((age - 50) / 14))

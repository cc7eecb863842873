"""Bringing a placed brain to its tissue volumes: white to grey matter, grey matter to fluid,
lesions.
"""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

from moecore.data.phantom.geometry import Placement
from moecore.data.phantom.numbers import (
    FLUID,
    GREY,
    LESION_DARKER,
    LESION_SPOT,
    LESION_SPOT_WEIGHT,
    WHITE,
)

MOST = 0.9  # of what a voxel holds may be taken from it
ROUNDS = 4  # of sharing out what capped voxels could not give
ENOUGH = 0.5  # voxels: 0.0135 mL; what is left over is smaller than that


class Targets(NamedTuple):
    """The volumes that a brain is made to have: shares of the head."""

    grey: float
    white: float
    ventricles: float
    lesions: float


class Tissue(NamedTuple):
    """Maps float32 (64, 64, 64), as shares of a voxel; ``fluid`` holds the ventricles, lesions are
    part of white matter.
    """

    brightness: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    fluid: np.ndarray
    ventricles: np.ndarray
    lesions: np.ndarray


def adjusted(
    placement: Placement, targets: Targets, thinning: np.ndarray, spots: np.ndarray
) -> Tissue:
    """Move tissue across its boundaries until grey and white matter have their shares of the head.

    thinning: (64, 64, 64) where grey matter goes first; spots: (64, 64, 64) smooth field, lesions
    where it is high.
    """
    grey = placement.grey
    white = placement.white
    fluid = placement.fluid
    head = float((grey + white + fluid + placement.ventricles).sum(dtype=np.float64))
    to_grey = transfer(
        white, grey, _total(white) - targets.white * head, _blurred(grey), _blurred(white)
    )
    white = white - to_grey
    grey_between = grey + to_grey
    to_fluid = transfer(
        grey_between,
        fluid,
        _total(grey_between) - targets.grey * head,
        _blurred(fluid) * thinning,
        _blurred(grey_between),
    )
    grey = grey_between - to_fluid
    fluid = fluid + to_fluid
    high = np.clip(spots - LESION_SPOT, 0, 1)
    lesions = taken(
        white, (placement.caps + LESION_SPOT_WEIGHT * high) ** 2, targets.lesions * head
    )
    brightness = (
        placement.brightness - np.float32(WHITE) * to_grey + np.float32(GREY) * (to_grey - to_fluid)
    )
    brightness += np.float32(FLUID) * to_fluid - np.float32(LESION_DARKER) * lesions
    return Tissue(
        brightness, grey, white, fluid + placement.ventricles, placement.ventricles, lesions
    )


def transfer(
    source: np.ndarray, sink: np.ndarray, amount: float, where: np.ndarray, back: np.ndarray
) -> np.ndarray:
    """What goes from ``source`` to ``sink`` in each voxel, ``amount`` voxels in all, in proportion
    to ``where``; with a negative amount tissue goes the other way, in proportion to ``back``, and
    the result is negative.
    """
    if amount > 0:
        return taken(source, where, amount)
    return -taken(sink, back, -amount)


def taken(source: np.ndarray, weight: np.ndarray, amount: float) -> np.ndarray:
    """Take ``amount`` voxels from ``source`` in proportion to ``weight`` × source, at most 90 % of
    a voxel's content; float32, as source.
    """
    wanted = weight * source
    most = MOST * source
    result = np.zeros_like(source)
    for _ in range(ROUNDS):
        left = amount - _total(result)
        if left < ENOUGH:
            break
        open_voxels = wanted * (result < most)
        result = np.minimum(
            result + open_voxels * np.float32(left / (_total(open_voxels) + 1e-9)), most
        )
    return result


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _blurred(values: np.ndarray) -> np.ndarray:
    return ndimage.uniform_filter(values, 3)

"""Intervals of single predictions that hold whatever the model is: split conformal prediction.

Source: Lei et al. (2018), algorithm 2.
"""

import math
from collections.abc import Sequence

import numpy as np

from moecore.core.files import UserError


def conformal_radius(residuals: np.ndarray, level: float = 0.9) -> float | None:
    """Half the width of the interval that holds a new value with probability ``level`` or more.

    residuals: (n,) of volumes that took no part in training or calibration, one a participant. It
    is the ⌈(n + 1)·level⌉-th smallest |residual|; None where n is too small to have one (n < 9 for
    90 %). Valid where new volumes are drawn like these (exchangeable), on average over them, not
    for each age. Raises UserError for NaN and infinite residuals.
    """
    residuals = np.abs(np.asarray(residuals, np.float64))
    if not np.isfinite(residuals).all():
        raise UserError(
            "calibrate: residuals of the validation split are NaN or infinite; train the model "
            "again"
        )
    # In floating point 10 · 0.9 may be 9.000000000000002, whose ceiling is 10.
    rank = math.ceil((len(residuals) + 1) * level - 1e-9)
    if rank <= len(residuals):
        return float(np.sort(residuals)[rank - 1])
    return None


def first_volumes(participants: Sequence[str]) -> list[int]:
    """The place of each participant's first volume.

    Volumes of one person are not exchangeable with those of others.
    """
    first: dict[str, int] = {}
    for place, participant in enumerate(participants):
        first.setdefault(participant, place)
    return list(first.values())

"""Errors under corruption relative to a baseline (Hendrycks & Dietterich, 2019, section 4.2)."""

import math
from collections.abc import Mapping

from moecore.core.files import UserError

TINY = 1e-9  # differences of shares that should be equal are rounding
Errors = Mapping[str, Mapping[int, float]]  # corruption → severity → error in [0, 1]


def mean_corruption_error(errors: Errors, baseline: Errors) -> float:
    """mCE: mean over corruptions of Σ_s error / Σ_s baseline error.

    1 where both are alike, below 1 where the model is better.  Raises UserError where the two were
    not measured under the same corruptions and severities, or where the baseline makes no error at
    all under a corruption: its share of the mean is then not defined, and leaving it out would
    compare different sets.
    """
    return _mean_ratio(errors, 0.0, baseline, 0.0)


def relative_corruption_error(
    errors: Errors, clean: float, baseline: Errors, baseline_clean: float
) -> float:
    """Relative mCE: the same of the errors' excess over the clean error.

    Σ_s (error − clean) / Σ_s (baseline error − its clean).  Raises UserError like
    ``mean_corruption_error``, and where a corruption does not raise the baseline's error.
    """
    return _mean_ratio(errors, clean, baseline, baseline_clean)


def _mean_ratio(errors: Errors, clean: float, baseline: Errors, baseline_clean: float) -> float:
    ours = {name: set(row) for name, row in errors.items()}
    theirs = {name: set(row) for name, row in baseline.items()}
    if ours != theirs or not errors:
        needed = "need the same corruptions and severities, at least one"
        raise UserError(f"mean corruption error: the model and the baseline {needed}")
    ratios = []
    for name, row in errors.items():
        below = math.fsum(error - baseline_clean for error in baseline[name].values())
        if below < TINY:
            added = f"{name} adds no error to the baseline ({below:g} over its severities)"
            raise UserError(f"mean corruption error: {added}, so no ratio is defined")
        ratios.append(math.fsum(error - clean for error in row.values()) / below)
    return sum(ratios) / len(ratios)

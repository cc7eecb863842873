"""Errors of predicted ages with intervals: for the whole test split (table S1 of ERMoE's supplement) and for parts of it.

N volumes of P participants. Intervals resample participants, never volumes: two sessions of one person are no two persons.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moecore.evaluation.intervals import Interval, reflected
from moecore.evaluation.regression import age_fit
from moecore.files import StageError

LIMITS = {"mae": (0.0, np.inf), "corr": (-1.0, 1.0), "slope": (-np.inf, np.inf), "intercept": (-np.inf, np.inf)}


def age_table(ages: np.ndarray, variants: Mapping[str, np.ndarray], participants: Sequence[str], resamples: int) -> dict[str, dict[str, Interval]]:
    """variant → mae, corr(ŷ − y, y), slope and intercept of ŷ on y, each with its 95 % interval; the same resamples for every variant.

    ages: (N,); variants: name → predictions (N,); participants: (N,) ids. Raises StageError for NaN, no volumes, or a single age.
    """
    ages = _checked(ages, list(variants.values()))
    if np.ptp(ages) == 0:
        raise StageError(f"calibrate: all {len(ages)} test volumes have the age {ages[0]:g}; allowed: two ages or more")
    drawn = drawn_weights(participants, resamples)
    return {name: _intervals(np.asarray(predictions, np.float64), ages, drawn) for name, predictions in variants.items()}


def errors_by(
    groups: Sequence[str], ages: np.ndarray, variants: Mapping[str, np.ndarray], participants: Sequence[str], resamples: int
) -> list[dict[str, Any]]:
    """One row a group, in sorted order: group, n (volumes), participants, mean_age, and for every variant its MAE and mean error, with intervals.

    groups: (N,) names, such as decades, sexes or sites. A group of one participant has no limits.
    """
    ages, names = _checked(ages, list(variants.values())), np.array(groups, dtype=object)
    rows = []
    for group in sorted(set(groups)):
        own = np.flatnonzero(names == group)
        people = [participants[place] for place in own]
        drawn = drawn_weights(people, resamples)
        errors = {name: _mean_errors(np.asarray(values, np.float64)[own], ages[own], drawn) for name, values in variants.items()}
        rows.append({"group": group, "n": len(own), "participants": len(set(people)), "mean_age": float(ages[own].mean()), **errors})
    return rows


def decade(age: float) -> str:
    """The decade of an age: 67.3 → "60–69"."""
    first = int(age // 10) * 10
    return f"{first}–{first + 9}"


def drawn_weights(participants: Sequence[str], resamples: int, seed: int = 0) -> np.ndarray:
    """(resamples, N): how often each volume is in a resample; all volumes of a participant are drawn together."""
    _, person = np.unique(np.array(participants, dtype=object).astype(str), return_inverse=True)
    number = person.max() + 1
    counts = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), size=resamples)
    return counts[:, person].astype(np.float64)


def statistics(predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """mae, corr, slope, intercept under each row of ``weights`` (R, N), each (R,); NaN where a row has one age only, or its errors do not vary."""
    total, shift = weights.sum(1), ages.mean()
    y, p = ages - shift, predictions - shift  # ages around 0 keep the digits
    d = p - y
    mean_y, mean_p, mean_d = (weights @ values / total for values in (y, p, d))
    yy, yp, yd, dd = (weights @ product / total for product in (y * y, y * p, y * d, d * d))
    var_y, var_d = np.maximum(yy - mean_y**2, 0), np.maximum(dd - mean_d**2, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(var_y > 1e-12, (yp - mean_y * mean_p) / var_y, np.nan)
        corr = np.where(var_y * var_d > 1e-24, (yd - mean_y * mean_d) / np.sqrt(var_y * var_d), np.nan)
    intercept = mean_p + shift - slope * (mean_y + shift)
    return {"mae": weights @ np.abs(d) / total, "corr": corr, "slope": slope, "intercept": intercept}


def _mean_errors(predictions: np.ndarray, ages: np.ndarray, drawn: np.ndarray) -> dict[str, Interval]:
    errors, total = predictions - ages, drawn.sum(1)
    means = {"mae": (np.abs(errors).mean(), drawn @ np.abs(errors) / total), "mean_error": (errors.mean(), drawn @ errors / total)}
    return {name: _limits(float(value), found, 0.0 if name == "mae" else -np.inf, np.inf) for name, (value, found) in means.items()}


def _intervals(predictions: np.ndarray, ages: np.ndarray, drawn: np.ndarray) -> dict[str, Interval]:
    values, found = age_fit(torch.from_numpy(predictions), torch.from_numpy(ages)), statistics(predictions, ages, drawn)
    return {name: _limits(values[name], found[name], *limits) for name, limits in LIMITS.items()}


def _limits(value: float, drawn: np.ndarray, lowest: float, highest: float) -> Interval:
    """The bootstrap interval; no limits where resamples do not vary or are undefined."""
    drawn = drawn[np.isfinite(drawn)]
    return reflected(value, drawn, lowest=lowest, highest=highest) if len(drawn) > 1 and np.ptp(drawn) else Interval(value)


def _checked(ages: np.ndarray, predictions: Sequence[np.ndarray]) -> np.ndarray:
    ages = np.asarray(ages, np.float64)
    if len(ages) == 0:
        raise StageError("calibrate: there are no test volumes")
    if not np.isfinite(ages).all() or not all(np.isfinite(values).all() for values in predictions):
        raise StageError("calibrate: ages or predictions of the test split are NaN or infinite; train the model again")
    return ages

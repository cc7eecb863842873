"""Errors of predicted ages with intervals: for the whole test split and for parts of it.

N volumes of P participants, R resamples. Intervals resample participants, never volumes: two
sessions of one person are no two persons. Source: ERMoE, supplement, table S1.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.statistics.intervals import Estimate, reflected_interval
from moecore.tasks.regression import age_fit


class AgeErrors(Config):
    """Agreement of predictions ŷ with ages y, each value with its 95 % interval."""

    mae: Estimate | None  # mean |ŷ − y|, years; None where y was used to correct ŷ
    corr: Estimate  # of ŷ − y with y
    slope: Estimate  # of ŷ on y
    intercept: Estimate  # of ŷ on y, years


class MeanAbsoluteError(Config):
    """The mean |ŷ − y| of a group, years."""

    mae: Estimate


class GroupErrors(Config):
    """Errors of a part of the test split, as predicted and as corrected by one line."""

    group: str
    n: int  # volumes
    raw: MeanAbsoluteError
    pooled: MeanAbsoluteError | None = None


def measure_age_errors(
    ages: np.ndarray,
    variants: Mapping[str, np.ndarray],
    participants: Sequence[str],
    no_predictions: Collection[str] = (),
) -> dict[str, AgeErrors]:
    """The errors of each variant; the same resamples for every one.

    ages: (N,); variants: name → predictions (N,); participants: (N,) ids; no_predictions: variants
    that the known ages were used for, which have no MAE. UserError for one age.
    """
    if np.ptp(ages) == 0:
        raise UserError(
            f"calibrate: all {len(ages)} test volumes have the age {ages[0]:g}; allowed: two ages "
            "or more"
        )
    weights = draw_resample_weights(participants)
    errors = {
        name: _age_errors(predictions, ages, weights) for name, predictions in variants.items()
    }
    return errors | {name: errors[name].model_copy(update={"mae": None}) for name in no_predictions}


def measure_group_errors(
    groups: Sequence[str],
    ages: np.ndarray,
    variants: Mapping[str, np.ndarray],
    participants: Sequence[str],
) -> tuple[GroupErrors, ...]:
    """One row a group, in sorted order; a group of one participant has no limits.

    groups: (N,) names, such as decades, sexes or sites; variants: "raw", and where a line was
    fitted "pooled" → predictions (N,).
    """
    rows = []
    for group in sorted(set(groups)):
        own = [place for place, name in enumerate(groups) if name == group]
        weights = draw_resample_weights([participants[place] for place in own])
        errors = {}
        for name, predictions in variants.items():
            size = np.abs(predictions[own] - ages[own])
            drawn = weights @ size / weights.sum(1)
            errors[name] = MeanAbsoluteError(mae=bootstrap_estimate(size.mean(), drawn, 0.0))
        rows.append(GroupErrors(group=group, n=len(own), **errors))
    return tuple(rows)


def age_decade(age: float) -> str:
    """The decade of an age: 67.3 → "60–69"."""
    first = int(age // 10) * 10
    return f"{first}–{first + 9}"


def draw_resample_weights(participants: Sequence[str], resamples: int = 1000) -> np.ndarray:
    """Return how often each volume is in a resample, (R, N); a participant's are drawn together."""
    _, person = np.unique(np.array(participants, dtype=object).astype(str), return_inverse=True)
    number = person.max() + 1
    counts = np.random.default_rng(0).multinomial(
        number, np.full(number, 1 / number), size=resamples
    )
    return counts[:, person].astype(np.float64)


def age_errors_by_resample(
    predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """mae, corr, slope, intercept under each row of ``weights`` (R, N), each (R,).

    NaN where a row has one age only, or its errors do not vary.
    """
    total = weights.sum(1)
    # Ages around 0 keep the digits.
    shift = ages.mean()
    y = ages - shift
    p = predictions - shift
    d = p - y
    mean_y, mean_p, mean_d = (weights @ values / total for values in (y, p, d))
    yy, yp, yd, dd = (weights @ product / total for product in (y * y, y * p, y * d, d * d))
    var_y = np.maximum(yy - mean_y**2, 0)
    var_d = np.maximum(dd - mean_d**2, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(var_y > 1e-12, (yp - mean_y * mean_p) / var_y, np.nan)
        along = (yd - mean_y * mean_d) / np.sqrt(var_y * var_d)
        corr = np.where(var_y * var_d > 1e-24, along, np.nan)
    intercept = mean_p + shift - slope * (mean_y + shift)
    mae = weights @ np.abs(d) / total
    return {"mae": mae, "corr": corr, "slope": slope, "intercept": intercept}


def _age_errors(predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray) -> AgeErrors:
    fit = age_fit(torch.from_numpy(predictions), torch.from_numpy(ages))
    resampled = age_errors_by_resample(predictions, ages, weights)
    return AgeErrors(
        mae=bootstrap_estimate(fit["mae"], resampled["mae"], 0.0),
        corr=bootstrap_estimate(fit["corr"], resampled["corr"], -1.0, 1.0),
        slope=bootstrap_estimate(fit["slope"], resampled["slope"]),
        intercept=bootstrap_estimate(fit["intercept"], resampled["intercept"]),
    )


def bootstrap_estimate(
    value: float, drawn: np.ndarray, lowest: float = -np.inf, highest: float = np.inf
) -> Estimate:
    """The bootstrap interval; no limits where resamples do not vary or are undefined."""
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 2 or not np.ptp(drawn):
        return Estimate(value=value)
    return Estimate.of(reflected_interval(value, drawn.tolist(), lowest=lowest, highest=highest))

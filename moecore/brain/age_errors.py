"""Errors of predicted ages with intervals: for the whole test split and for parts of it.

N volumes of P participants, R resamples. Intervals resample participants, never volumes: two
sessions of one person are no two persons. Source: ERMoE, supplement, table S1.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.statistics.intervals import Estimate, Interval, reflected_interval
from moecore.tasks.errors import age_fit


class AgeErrors(Config):
    """Agreement of predictions ŷ with ages y, each value with its 95 % interval."""

    mae: Estimate  # mean |ŷ − y|, years
    corr: Estimate  # of ŷ − y with y
    slope: Estimate  # of ŷ on y
    intercept: Estimate  # of ŷ on y, years


class MeanErrors(Config):
    """Errors of a group, in years."""

    mae: Estimate
    mean_error: Estimate  # ŷ − y


class GroupErrors(Config):
    """Errors of a part of the test split, as predicted and as corrected."""

    group: str
    n: int  # volumes
    participants: int
    mean_age: float
    raw: MeanErrors
    pooled: MeanErrors | None = None
    sex_specific: MeanErrors | None = None


def measure_age_errors(
    ages: np.ndarray,
    variants: Mapping[str, np.ndarray],
    participants: Sequence[str],
    resamples: int,
) -> dict[str, AgeErrors]:
    """The errors of each variant; the same resamples for every one.

    ages: (N,); variants: name → predictions (N,); participants: (N,) ids. Raises UserError for NaN,
    no volumes, or a single age.
    """
    ages = _check_ages(ages, list(variants.values()))
    if np.ptp(ages) == 0:
        raise UserError(
            f"calibrate: all {len(ages)} test volumes have the age {ages[0]:g}; allowed: two ages "
            "or more"
        )
    weights = draw_resample_weights(participants, resamples)
    return {
        name: _age_errors(np.asarray(predictions, np.float64), ages, weights)
        for name, predictions in variants.items()
    }


def measure_group_errors(
    groups: Sequence[str],
    ages: np.ndarray,
    variants: Mapping[str, np.ndarray],
    participants: Sequence[str],
    resamples: int,
) -> tuple[GroupErrors, ...]:
    """One row a group, in sorted order; a group of one participant has no limits.

    groups: (N,) names, such as decades, sexes or sites; variants: "raw", and where a line was
    fitted "pooled" and "sex_specific" → predictions (N,).
    """
    ages = _check_ages(ages, list(variants.values()))
    names = np.array(groups, dtype=object)
    rows = []
    for group in sorted(set(groups)):
        own = np.flatnonzero(names == group)
        people = [participants[place] for place in own.tolist()]
        weights = draw_resample_weights(people, resamples)
        errors = {
            name: _mean_errors(np.asarray(values, np.float64)[own], ages[own], weights)
            for name, values in variants.items()
        }
        rows.append(
            GroupErrors(
                group=group,
                n=len(own),
                participants=len(set(people)),
                mean_age=float(ages[own].mean()),
                **errors,
            )
        )
    return tuple(rows)


def age_decade(age: float) -> str:
    """The decade of an age: 67.3 → "60–69"."""
    first = int(age // 10) * 10
    return f"{first}–{first + 9}"


def draw_resample_weights(participants: Sequence[str], resamples: int) -> np.ndarray:
    """Return how often each volume is in a resample, (R, N); a participant's are drawn together."""
    _, person = np.unique(np.array(participants, dtype=object).astype(str), return_inverse=True)
    number = person.max() + 1
    counts = np.random.default_rng(0).multinomial(
        number, np.full(number, 1 / number), size=resamples
    )
    return counts[:, person].astype(np.float64)


def weighted_age_statistics(
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


def _mean_errors(predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray) -> MeanErrors:
    errors = predictions - ages
    size = np.abs(errors)
    total = weights.sum(1)
    mae = _bootstrap_estimate(float(size.mean()), weights @ size / total, 0.0, np.inf)
    mean = _bootstrap_estimate(float(errors.mean()), weights @ errors / total, -np.inf, np.inf)
    return MeanErrors(mae=mae, mean_error=mean)


def _age_errors(predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray) -> AgeErrors:
    fit = age_fit(torch.from_numpy(predictions), torch.from_numpy(ages))
    resampled = weighted_age_statistics(predictions, ages, weights)
    return AgeErrors(
        mae=_bootstrap_estimate(fit["mae"], resampled["mae"], 0.0, np.inf),
        corr=_bootstrap_estimate(fit["corr"], resampled["corr"], -1.0, 1.0),
        slope=_bootstrap_estimate(fit["slope"], resampled["slope"], -np.inf, np.inf),
        intercept=_bootstrap_estimate(fit["intercept"], resampled["intercept"], -np.inf, np.inf),
    )


def _bootstrap_estimate(value: float, drawn: np.ndarray, lowest: float, highest: float) -> Estimate:
    """The bootstrap interval; no limits where resamples do not vary or are undefined."""
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 2 or not np.ptp(drawn):
        return Estimate.of(Interval(value))
    return Estimate.of(reflected_interval(value, drawn.tolist(), lowest=lowest, highest=highest))


def _check_ages(ages: np.ndarray, predictions: Sequence[np.ndarray]) -> np.ndarray:
    ages = np.asarray(ages, np.float64)
    if len(ages) == 0:
        raise UserError("calibrate: there are no test volumes")
    if not np.isfinite(ages).all() or not all(np.isfinite(values).all() for values in predictions):
        raise UserError(
            "calibrate: ages or predictions of the test split are NaN or infinite; train the model "
            "again"
        )
    return ages

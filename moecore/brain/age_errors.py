"""Errors of predicted ages in years, with bootstrap intervals (ERMoE, supplement, table S1)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.statistics.intervals import Estimate, basic_bootstrap_interval
from moecore.tasks.regression import measure_age_bias


class AgeErrors(Config):
    """Errors of predicted ages ŷ against known ages y, each with its 95 % interval."""

    mae: Estimate | None  # mean |ŷ − y|, years; None where y was used to correct ŷ
    corr: Estimate  # of ŷ − y with y
    slope: Estimate  # of ŷ on y
    intercept: Estimate  # of ŷ on y, years


class MeanAbsoluteError(Config):
    mae: Estimate  # the mean |ŷ − y| of a group, years


class GroupErrors(Config):
    """Errors of a group's volumes: raw, and corrected by one regression line for all (pooled)."""

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
    """Return errors, with bootstrap intervals, by variant (N,); no MAE of ``no_predictions``."""
    # no_predictions: variants that used the known ages, and so have no MAE.
    if np.ptp(ages) == 0:
        raise UserError(f"calibrate: all {len(ages)} test ages are {ages[0]:g}; allowed: 2 or more")
    weights = draw_resample_weights(participants)
    limits = {"mae": (0.0,), "corr": (-1.0, 1.0)}
    errors = {}
    for name, predictions in variants.items():
        fit: Any = measure_age_bias(torch.from_numpy(predictions), torch.from_numpy(ages))
        estimates: dict[str, Estimate | None] = {
            key: resampled_estimate(fit[key], values, *limits.get(key, ()))
            for key, values in age_errors_by_resample(predictions, ages, weights).items()
        }
        if name in no_predictions:
            estimates["mae"] = None
        errors[name] = AgeErrors.model_validate(estimates)
    return errors


def measure_group_errors(
    groups: Sequence[str],
    ages: np.ndarray,
    variants: Mapping[str, np.ndarray],
    participants: Sequence[str],
) -> tuple[GroupErrors, ...]:
    """Return the MAE of each variant per group; without interval for a single participant."""
    rows = []
    for group in sorted(set(groups)):
        members = [index for index, name in enumerate(groups) if name == group]
        weights = draw_resample_weights([participants[index] for index in members])
        errors = {}
        for name, predictions in variants.items():
            size = np.abs(predictions[members] - ages[members])
            resampled = weights @ size / weights.sum(1)
            errors[name] = MeanAbsoluteError(mae=resampled_estimate(size.mean(), resampled, 0.0))
        rows.append(GroupErrors(group=group, n=len(members), **errors))
    return tuple(rows)


def draw_resample_weights(participants: Sequence[str], resamples: int = 1000) -> np.ndarray:
    """Return how often each of N volumes occurs in each of R resamples of participants, (R, N)."""
    # Participants are resampled, not volumes: two sessions of one person are not independent.
    _, person = np.unique(np.array(participants, dtype=object).astype(str), return_inverse=True)
    number = person.max() + 1
    shares = np.full(number, 1 / number)
    counts = np.random.default_rng(0).multinomial(number, shares, size=resamples)
    return counts[:, person].astype(np.float64)


def age_errors_by_resample(
    predictions: np.ndarray, ages: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the ``mae``, ``corr``, ``slope`` and ``intercept`` of each resample, (R,) each."""
    # weights: (R, N), of each volume in each resample. NaN where a resample has a single age, or
    # errors that do not vary.
    total = weights.sum(1)
    # The variances below subtract squares: centred ages lose fewer digits.
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


def resampled_estimate(
    value: float, resampled: np.ndarray, lowest: float = -np.inf, highest: float = np.inf
) -> Estimate:
    """Return ``value`` and, if finite resamples differ, their 95 % limits in [lowest, highest]."""
    resampled = resampled[np.isfinite(resampled)]
    if len(resampled) < 2 or not np.ptp(resampled):
        return Estimate(value=value)
    interval = basic_bootstrap_interval(value, resampled.tolist(), lowest=lowest, highest=highest)
    return Estimate.of(interval)


MIN_DIAGNOSIS_PARTICIPANTS = 2  # per diagnosis, to resample


class DiagnosisGap(Config):
    """Gaps (predicted − known age) of a diagnosis against the most frequent one in training."""

    diagnosis: str
    reference: str
    corrected: bool = Field(description="whether the gap is of the corrected predictions")
    n: int = Field(description="test volumes with the diagnosis")
    n_reference: int = Field(description="test volumes of the reference")
    difference: Estimate = Field(description="of the mean gaps, years")
    adjusted: Estimate = Field(description="the same at equal age and sex, years")
    auc: Estimate = Field(description="P(gap with the diagnosis > reference gap); ties ½, chance ½")


class AgeGaps(NamedTuple):
    gaps: np.ndarray  # (N,), predicted minus known age of the test volumes
    ages: np.ndarray  # (N,)
    sexes: Sequence[str]
    diagnoses: Sequence[str]  # "" where unknown
    people: Sequence[str]


def measure_diagnosis_gaps(
    rows: AgeGaps, train_diagnoses: Sequence[str], corrected: bool
) -> tuple[DiagnosisGap, ...]:
    """Compare each test diagnosis with the most frequent one in training; () if none is known."""
    counts = Counter(diagnosis for diagnosis in train_diagnoses if diagnosis)
    if not counts:
        return ()
    reference = counts.most_common(1)[0][0]
    names = np.array(rows.diagnoses, dtype=str)
    people = np.array(rows.people, dtype=str)
    measured = []
    for name in sorted(set(names) - {reference, ""}):
        cases = np.flatnonzero(names == name)
        controls = np.flatnonzero(names == reference)
        if any(len(set(people[side])) < MIN_DIAGNOSIS_PARTICIPANTS for side in (cases, controls)):
            continue
        gap: dict[str, Any] = {"diagnosis": name, "reference": reference, "corrected": corrected}
        gap |= {"n": len(cases), "n_reference": len(controls)}
        gap |= _compare_groups(rows, cases, controls)
        measured.append(DiagnosisGap.model_validate(gap))
    return tuple(measured)


def _compare_groups(rows: AgeGaps, cases: np.ndarray, controls: np.ndarray) -> dict[str, Estimate]:
    sides = (cases, controls)
    weights = [draw_resample_weights([rows.people[place] for place in side]) for side in sides]
    ones = [np.ones((1, len(side))) for side in sides]
    observed, resampled = (
        {
            "difference": _mean(rows.gaps[cases], first) - _mean(rows.gaps[controls], second),
            "adjusted": _adjusted_difference(rows, cases, controls, first, second),
            "auc": _weighted_auc(rows.gaps[cases], rows.gaps[controls], first, second),
        }
        for first, second in (ones, weights)
    )
    limits = {"auc": (0.0, 1.0)}
    return {
        name: resampled_estimate(float(value[0]), resampled[name], *limits.get(name, ()))
        for name, value in observed.items()
    }


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean of values (n,) under each row of weights (R, n)."""
    return weights @ values / weights.sum(axis=1)


def _adjusted_difference(
    rows: AgeGaps, cases: np.ndarray, controls: np.ndarray, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Return cases − controls of the gap at equal age and sex, least squares, per resample (R,)."""
    # first, second: weights (R, n) of cases and of controls, one row per resample.
    chosen = np.concatenate([cases, controls])
    group = np.repeat([1.0, 0.0], [len(cases), len(controls)])
    women = np.array([{"F": 0.5, "M": -0.5}.get(rows.sexes[place], 0.0) for place in chosen])
    ages = rows.ages[chosen] - rows.ages[chosen].mean()
    design = np.column_stack([np.ones(len(chosen)), group, ages, women])
    weights = np.concatenate([first, second], axis=1)
    products = np.einsum("rn,ni,nj->rij", weights, design, design)
    sums = np.einsum("rn,ni,n->ri", weights, design, rows.gaps[chosen])
    # The pseudo-inverse: a resample with a single sex has a singular matrix.
    return np.einsum("rij,rj->ri", np.linalg.pinv(products, hermitian=True), sums)[:, 1]


def _weighted_auc(
    cases: np.ndarray, controls: np.ndarray, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """Return P(case > control) + ½ P(equal), (R,), by weights (R, n) of cases and controls."""
    wins = (np.sign(cases[:, None] - controls[None]) + 1) / 2
    return ((first @ wins) * last).sum(axis=1) / (first.sum(axis=1) * last.sum(axis=1))

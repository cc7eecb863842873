"""Errors of predicted ages with intervals: for the whole test split, its parts, and diagnoses.

N volumes of P participants, R resamples, in years. Intervals resample participants, never volumes:
two sessions of one person are no two persons. Source: ERMoE, supplement, table S1.

The gap between predicted and known age of people with a diagnosis is compared with that of people
without one; the participants of both sides are resampled apart. A difference of groups says nothing
of a person, and the raw gap depends on age: so the difference is also given at the same age and
sex, the coefficient of the group in a least-squares fit of the gap on group, age and sex.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field

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


FEWEST = 2  # participants of a side


class DiagnosisGap(Config):
    """One diagnosis beside the reference, the diagnosis that most training volumes have."""

    diagnosis: str
    reference: str
    corrected: bool = Field(description="whether the gap is that of the corrected predictions")
    n: int = Field(description="test volumes with the diagnosis")
    n_reference: int = Field(description="test volumes of the reference")
    difference: Estimate = Field(description="of the mean gaps, years")
    adjusted: Estimate = Field(description="the same at equal age and sex, years")
    auc: Estimate = Field(
        description="P(the gap of one with the diagnosis is the larger), ties half; ½ is chance"
    )


class GapRows(NamedTuple):
    """The test volumes: gaps (N,), ages (N,), and who they are."""

    gaps: np.ndarray
    ages: np.ndarray
    sexes: Sequence[str]
    diagnoses: Sequence[str]  # "" where it is not known
    people: Sequence[str]


def measure_diagnosis_gaps(
    rows: GapRows, train_diagnoses: Sequence[str], corrected: bool
) -> tuple[DiagnosisGap, ...]:
    """Return one row a diagnosis of the test but the reference, in sorted order.

    train_diagnoses: of the training volumes. None where nobody of the test has the reference, and
    for a diagnosis of fewer than two participants.
    """
    known = Counter(one for one in train_diagnoses if one)
    if not known:
        return ()
    reference = known.most_common(1)[0][0]
    names = np.array(rows.diagnoses, dtype=str)
    people = np.array(rows.people, dtype=str)
    measured = []
    for name in sorted(set(names) - {reference, ""}):
        sides = [np.flatnonzero(names == one) for one in (name, reference)]
        if any(len(set(people[side])) < FEWEST for side in sides):
            continue
        having, others = sides
        measured.append(
            DiagnosisGap(
                diagnosis=name,
                reference=reference,
                corrected=corrected,
                n=len(having),
                n_reference=len(others),
                **_compare_sides(rows, having, others),
            )
        )
    return tuple(measured)


def _compare_sides(rows: GapRows, having: np.ndarray, others: np.ndarray) -> dict[str, Estimate]:
    weights = [
        draw_resample_weights([rows.people[place] for place in side]) for side in (having, others)
    ]
    once = [np.ones((1, len(side))) for side in (having, others)]
    whole, drawn = (
        {
            "difference": _mean(rows.gaps[having], first) - _mean(rows.gaps[others], second),
            "adjusted": _adjusted_difference(rows, having, others, first, second),
            "auc": _auc(rows.gaps[having], rows.gaps[others], first, second),
        }
        for first, second in (once, weights)
    )
    limits = {"auc": (0.0, 1.0)}
    return {
        name: bootstrap_estimate(float(value[0]), drawn[name], *limits.get(name, ()))
        for name, value in whole.items()
    }


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Under each row of weights (R, n), (R,)."""
    return weights @ values / weights.sum(axis=1)


def _adjusted_difference(
    rows: GapRows, having: np.ndarray, others: np.ndarray, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """The group's coefficient beside age and sex, under each pair of rows of weights, (R,)."""
    chosen = np.concatenate([having, others])
    group = np.repeat([1.0, 0.0], [len(having), len(others)])
    women = np.array([{"F": 0.5, "M": -0.5}.get(rows.sexes[place], 0.0) for place in chosen])
    ages = rows.ages[chosen] - rows.ages[chosen].mean()
    design = np.column_stack([np.ones(len(chosen)), group, ages, women])
    weights = np.concatenate([first, second], axis=1)
    products = np.einsum("rn,ni,nj->rij", weights, design, design)
    sums = np.einsum("rn,ni,n->ri", weights, design, rows.gaps[chosen])
    # of least norm where a resample has one sex alone
    return np.einsum("rij,rj->ri", np.linalg.pinv(products, hermitian=True), sums)[:, 1]


def _auc(
    having: np.ndarray, others: np.ndarray, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """P(having > others) + ½ P(equal) under each pair of rows of weights, (R,)."""
    wins = (np.sign(having[:, None] - others[None]) + 1) / 2
    pairs = first.sum(axis=1) * second.sum(axis=1)
    return ((first @ wins) * second).sum(axis=1) / pairs

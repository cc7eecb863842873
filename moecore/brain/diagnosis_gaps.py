"""The gap between predicted and known age of people with a diagnosis, against those without.

N volumes of the test split, in years. Intervals resample the participants of both sides apart, R
times. A difference of groups says nothing of a person, and the raw gap depends on age: so the
difference is also given at the same age and sex, the coefficient of the group in a least-squares
fit of the gap on group, age and sex.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from moecore.brain.age_errors import bootstrap_estimate, draw_resample_weights
from moecore.core.config import Config
from moecore.statistics.intervals import Estimate

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

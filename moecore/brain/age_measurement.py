"""What is measured of predicted ages: errors before and after correction, and their intervals.

N volumes of the test split, in years. Intervals of single predictions: split conformal prediction,
which holds whatever the model is (Lei et al. 2018, algorithm 2).
"""

import math
from typing import cast

import numpy as np
import torch
from pydantic import Field

from moecore.brain.age_errors import (
    AgeErrors,
    DiagnosisGap,
    GapRows,
    GroupErrors,
    age_decade,
    measure_age_errors,
    measure_diagnosis_gaps,
    measure_group_errors,
)
from moecore.brain.age_measurement import Ages, CalibratorFit
from moecore.brain.prediction_table import ConformalInterval
from moecore.brain.tissue_ridge import RidgeResult
from moecore.core.config import Config
from moecore.measure.calibrators.base import FitOn
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import Estimate, mean_share
from moecore.tasks.regression import Regression, median_mae

INTERVAL_LEVEL = 0.9  # of the interval of a single prediction


class AgePoints(Config):
    """Every test volume, for pictures."""

    age: tuple[float, ...]
    sex: tuple[str, ...]
    raw: tuple[float, ...]
    pooled: tuple[float, ...] | None


class AgeResult(Config):
    """Errors of predicted ages before and after correction, in years."""

    kind: str = Field("linear", description="of the calibrator")
    uses_age: bool = Field(
        False, description="whether the correction takes the known age: then it predicts none"
    )
    unit: str
    simulated: bool
    n_test: int = Field(description="volumes")
    n_fit: int = Field(description="pairs that the line was fitted to")
    fit_on: FitOn
    refused: str | None = Field(description="why no line was fitted; null where one was")
    raw: AgeErrors
    pooled: AgeErrors | None
    sex_specific: AgeErrors | None
    median_mae: float = Field(description="of always saying the training's median age")
    age_range: tuple[float, float]
    by_sex: tuple[GroupErrors, ...]
    by_decade: tuple[GroupErrors, ...]
    by_site: tuple[GroupErrors, ...]
    by_diagnosis: tuple[GroupErrors, ...] = ()
    diagnosis_gaps: tuple[DiagnosisGap, ...] = Field(
        (), description="of each diagnosis against the one that most training volumes have"
    )
    interval: ConformalInterval
    tissue_ridge: RidgeResult | None = Field(
        None, description="the same data's ridge regression on tissue volumes; null: not asked for"
    )
    predictor_sha256: str
    points: AgePoints
    items: dict[str, str] = Field(
        {}, description="of each variant's MAE one number a person (``encode_item_values``)"
    )


def summarize_age_errors(ages: Ages, line: CalibratorFit) -> AgeResult:
    """Table S1 with intervals, the median predictor, errors by group, and the points."""
    task = cast(Regression, ages.data.task)
    test_ages = ages.known("test")
    test = ages.correct_split("test", line.fitted)
    people = ages.column("test", "participant_id")
    sexes = ages.column("test", "sex")
    corrected = [name for name in test.variants if name != "raw"]
    no_predictions = corrected if line.uses_age else []
    table = measure_age_errors(test_ages, test.variants, people, no_predictions)
    predictions = {name: said for name, said in test.variants.items() if name not in no_predictions}
    by_one_line = {name: said for name, said in predictions.items() if name != "sex_specific"}

    def by(groups: list[str]) -> tuple[GroupErrors, ...]:
        return measure_group_errors(groups, test_ages, by_one_line, people)

    diagnoses = ages.column("test", "diagnosis")
    corrects = test.pooled is not None
    said = test.raw if test.pooled is None else test.pooled
    gaps = GapRows(said - test_ages, test_ages, sexes, diagnoses, people)
    return AgeResult(
        kind=line.kind,
        uses_age=line.uses_age,
        unit=task.unit,
        simulated=ages.data.card["simulated"],
        n_test=len(test_ages),
        n_fit=line.n,
        fit_on=line.split,
        refused=line.refused,
        raw=table["raw"],
        pooled=table.get("pooled"),
        sex_specific=table.get("sex_specific"),
        median_mae=median_mae(torch.from_numpy(ages.known("train")), torch.from_numpy(test_ages)),
        age_range=(float(test_ages.min()), float(test_ages.max())),
        by_sex=by(sexes),
        by_decade=by([age_decade(age) for age in test_ages]),
        by_site=by(ages.column("test", "site")),
        by_diagnosis=by(diagnoses) if any(diagnoses) else (),
        diagnosis_gaps=measure_diagnosis_gaps(gaps, ages.column("train", "diagnosis"), corrects),
        interval=fit_conformal_interval(ages, line),
        predictor_sha256=ages.sha256,
        points=AgePoints(
            age=test_ages.tolist(),
            sex=sexes,
            raw=test.raw.tolist(),
            pooled=None if test.pooled is None else test.pooled.tolist(),
        ),
        items={
            name: encode_item_values(np.abs(said - test_ages), ages.data.test.people)
            for name, said in predictions.items()
        },
    )


def fit_conformal_interval(ages: Ages, line: CalibratorFit) -> ConformalInterval:
    """The conformal interval from the validation split, and the share of test volumes inside."""
    # Volumes of one person are not exchangeable with those of others: the first of each is taken.
    people = ages.column("validation", "participant_id")
    places = np.unique(people, return_index=True)[1]
    residuals = ages.correct_split("validation", line.fitted).best - ages.known("validation")
    radius = conformal_radius(residuals[places], INTERVAL_LEVEL)
    errors = np.abs(ages.correct_split("test", line.fitted).best - ages.known("test"))
    coverage = None
    if radius is not None:
        coverage = Estimate.of(mean_share(errors <= radius, ages.data.test.people))
    method = "split conformal, |residuals| of one volume of each validation participant"
    if line.fitted is not None and line.split == "validation":
        # Then the residuals are a little too small, and the interval too narrow.
        method += "; these also fitted the line"
    return ConformalInterval(
        level=INTERVAL_LEVEL, radius=radius, n=len(places), coverage=coverage, method=method
    )


def conformal_radius(residuals: np.ndarray, level: float) -> float | None:
    """Half the width of the interval that holds a new value with probability ``level`` or more.

    residuals: (n,) of volumes that took no part in training or calibration, one a participant. It
    is the ⌈(n + 1)·level⌉-th smallest |residual|; None where n is too small (n < 9 for 90 %). Valid
    on average over new volumes drawn like these (exchangeable).
    """
    # In floating point 10 · 0.9 may be 9.000000000000002, whose ceiling is 10.
    rank = math.ceil((len(residuals) + 1) * level - 1e-9)
    if rank > len(residuals):
        return None
    return float(np.sort(np.abs(residuals))[rank - 1])

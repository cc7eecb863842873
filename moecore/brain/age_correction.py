"""Correct a model's predicted ages, and summarize their errors in years before and after."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from moecore.brain import age_errors, age_predictions
from moecore.brain.age_predictions import ConformalInterval, CorrectedAges
from moecore.brain.tissue_ridge import RidgeResult
from moecore.core.files import UserError, file_checksum
from moecore.data.prepared import SPLITS, Prepared
from moecore.measure.calibration import OnRefusal
from moecore.measure.calibrators.base import Calibrator, FitOn, FittedCalibrator
from moecore.measure.values import Metric, Values
from moecore.statistics.intervals import Estimate, Interval, mean_share
from moecore.tasks.regression import Regression, median_predictor_mae


class ModelAges(NamedTuple):
    """Ages that one model predicts for the volumes of all splits, with data and subjects."""

    data: Prepared
    predicted: Mapping[str, np.ndarray]  # by split, (N,)
    subjects: Mapping[str, Sequence[Mapping[str, str]]]  # by split, in the same order
    sha256: str  # of the model.safetensors

    @classmethod
    def of(cls, data: Prepared, predicted: Mapping[str, np.ndarray], weights: Path) -> "ModelAges":
        """Build with the subjects and weights' sha256; UserError for non-finite predictions."""
        for split, values in predicted.items():
            if bad := int((~np.isfinite(values)).sum()):
                raise UserError(
                    f"calibrate: {bad} of {len(values)} predictions of the split {split} are NaN "
                    "or infinite; train the model again"
                )
        subjects = {split: data.subjects(split) for split in SPLITS}
        return cls(data, predicted, subjects, file_checksum(weights))

    def known(self, split: str) -> np.ndarray:
        return np.asarray(getattr(self.data, split).labels, np.float64)

    def column(self, split: str, name: str) -> list[str]:
        """Return the column ``name`` of the subjects table, one text per volume; "" if unknown."""
        return [row[name] for row in self.subjects[split]]

    def correct_split(self, split: str, fitted: FittedCalibrator | None) -> CorrectedAges:
        predicted = self.predicted[split]
        sexes = self.column(split, "sex")
        return age_predictions.correct_ages(predicted, sexes, fitted, self.known(split))


class CalibratorFit(NamedTuple):
    fitted: FittedCalibrator | None
    refused: str | None
    n: int  # pairs of a predicted and a known age that it was fitted to
    split: FitOn
    kind: str = "linear"

    @property
    def uses_age(self) -> bool:
        """True if the correction needs the known age, so that corrected ages are no predictions."""
        return self.fitted is not None and self.fitted.uses_age


def fit_calibrator(
    ages: ModelAges, calibrator: Calibrator, out_of_fold: Path, on_refusal: OnRefusal = "stop"
) -> CalibratorFit:
    # out_of_fold: that stage's predictions.csv. on_refusal "report": the reason is returned.
    if calibrator.split == "out_of_fold":
        rows = age_predictions.read_predictions(out_of_fold)
        predicted_volumes, training_volumes = (
            {(row["participant_id"], row["session_id"]) for row in table}
            for table in (rows, ages.subjects["train"])
        )
        if predicted_volumes != training_volumes:
            raise UserError(
                f"{out_of_fold}: its volumes differ from the training split's; run the stage "
                "`out_of_fold` again"
            )
        predicted = np.array([float(row["predicted_age"]) for row in rows])
        known_ages = np.array([float(row["age"]) for row in rows])
        sexes = [row["sex"] for row in rows]
    else:
        predicted = ages.predicted[calibrator.split]
        known_ages = ages.known(calibrator.split)
        sexes = ages.column(calibrator.split, "sex")
    try:
        fitted = calibrator.fit(predicted, known_ages, sexes)
    except UserError as error:
        if on_refusal == "stop":
            raise
        warnings.warn(f"{error}. Nothing is corrected (calibrate.on_refusal: report)", stacklevel=2)
        return CalibratorFit(None, str(error), len(known_ages), calibrator.split, calibrator.kind)
    fitted = fitted.model_copy(update={"predictor_sha256": ages.sha256})
    return CalibratorFit(fitted, None, len(known_ages), calibrator.split, calibrator.kind)


INTERVAL_LEVEL = 0.9  # of the interval of a single prediction
PREDICTIONS = {"raw": "as predicted", "pooled": "corrected", "sex_specific": "corrected per sex"}
_of_ages = partial(Metric, paper="ages")
METRICS = {
    "median_mae": Metric("Median predictor's MAE", note="of predicting training's median age"),
    "mae_of_median": Metric(
        "MAE / median predictor's",
        "lower",
        note="test MAE / the median predictor's; below 0.5 is less than half its error",
    ),
    "mae_pooled": Metric("MAE, corrected", "lower", note="one line for all, (ŷ − a)/b"),
    "mae_sex_specific": _of_ages("MAE, corrected per sex", "lower", note="a line for each sex"),
    "mae_raw": Metric(""),
    **{
        f"corr_{name}": _of_ages(f"Corr., {title}", note="of the error with age; 0 is no leaning")
        for name, title in PREDICTIONS.items()
    },
    **{
        f"corr_size_{name}": _of_ages(
            f"|Corr.|, {title}",
            "lower",
            note="of the error with age, without its sign",
            detail=True,
        )
        for name, title in PREDICTIONS.items()
    },
    **{
        f"{number}_{name}": _of_ages(
            f"{number.title()}, {title}", note="of predicted on known age", detail=True
        )
        for name, title in PREDICTIONS.items()
        for number in ("slope", "intercept")
    },
    "gap": _of_ages(
        "Gap, {}",
        note="its mean minus that of the diagnosis of most training volumes, years",
        over="diagnosis",
    ),
    "gap_adjusted": _of_ages(
        "Gap at equal age and sex, {}",
        note="minus that of the diagnosis of most training volumes, years",
        over="diagnosis",
    ),
    "gap_auc": _of_ages(
        "AUC of the gap, {}",
        note="against the diagnosis of most training volumes; ½ is chance",
        over="diagnosis",
    ),
    "ridge_mae": _of_ages(
        "Ridge's MAE, years",
        "lower",
        note="of ridge regression on the volumes of the three tissues, on the same data",
    ),
    "interval_radius": _of_ages("90 % interval, ± years", "lower", note="split conformal, single"),
    "interval_coverage": _of_ages(
        "Interval's coverage",
        form="share",
        note="share of the test volumes inside the 90 % interval of a single prediction",
        limits="wilson",
        detail=True,
    ),
}


class AgeResult(NamedTuple):
    kind: str  # of the calibrator
    uses_age: bool  # whether the correction uses the known age, and so is no prediction
    unit: str
    simulated: bool
    n_test: int  # volumes
    n_fit: int  # pairs of ages that the calibrator was fitted to
    fit_on: FitOn
    refused: str | None  # why the fit was refused; None if it was not
    raw: age_errors.AgeErrors
    pooled: age_errors.AgeErrors | None
    sex_specific: age_errors.AgeErrors | None
    median_mae: float  # of always predicting the median age of the training split
    age_range: tuple[float, float]
    by_sex: tuple[age_errors.GroupErrors, ...]
    by_decade: tuple[age_errors.GroupErrors, ...]
    by_site: tuple[age_errors.GroupErrors, ...]
    by_diagnosis: tuple[age_errors.GroupErrors, ...]
    # each diagnosis against the diagnosis that most training volumes have
    diagnosis_gaps: tuple[age_errors.DiagnosisGap, ...]
    interval: ConformalInterval
    predictor_sha256: str
    points: dict[str, Any]  # age, sex, raw and pooled prediction of each test volume
    absolute: dict[str, np.ndarray]  # |error| of each volume (N,), per variant that predicts ages
    tissue_ridge: RidgeResult | None = None  # ridge regression on tissue volumes, if set

    def put_metrics(self, out: Values) -> None:
        """Put the errors as values of METRICS, and the other fields into ``out.facts``."""
        out.put("median_mae", self.median_mae)
        if self.raw.mae is not None:
            ratio = Interval(self.raw.mae.value / self.median_mae)
            out.put("mae_of_median", self.absolute["raw"] / self.median_mae, ratio)
        for name in PREDICTIONS:
            errors: age_errors.AgeErrors | None = getattr(self, name)
            if errors is None:
                continue
            if errors.mae is not None:
                out.put(f"mae_{name}", self.absolute[name], errors.mae.interval)
            out.put(f"corr_{name}", errors.corr.interval)
            out.put(f"corr_size_{name}", abs(errors.corr.value))
            out.put(f"slope_{name}", errors.slope.interval)
            out.put(f"intercept_{name}", errors.intercept.interval)
        for gap in self.diagnosis_gaps:
            out.put("gap", gap.difference.interval, diagnosis=gap.diagnosis)
            out.put("gap_adjusted", gap.adjusted.interval, diagnosis=gap.diagnosis)
            out.put("gap_auc", gap.auc.interval, diagnosis=gap.diagnosis)
        if (ridge := self.tissue_ridge) is not None and ridge.errors.mae is not None:
            mae = ridge.errors.mae.interval
            out.put("ridge_mae", mae if ridge.absolute is None else ridge.absolute, mae)
        out.put("interval_radius", self.interval.radius)
        if self.interval.coverage is not None:
            out.put("interval_coverage", self.interval.coverage.interval)
        metrics = {"raw", "pooled", "sex_specific", "median_mae", "absolute", "tissue_ridge"}
        out.facts |= {name: value for name, value in self._asdict().items() if name not in metrics}
        if ridge is not None:
            out.facts["tissue_ridge"] = ridge._replace(absolute=None)


def summarize_age_errors(ages: ModelAges, line: CalibratorFit) -> AgeResult:
    task = cast(Regression, ages.data.task)
    test_ages = ages.known("test")
    test = ages.correct_split("test", line.fitted)
    people = ages.column("test", "participant_id")
    sexes = ages.column("test", "sex")
    skipped = [name for name in test.variants if name != "raw"] if line.uses_age else []
    table = age_errors.measure_age_errors(test_ages, test.variants, people, skipped)
    predictions = {name: values for name, values in test.variants.items() if name not in skipped}
    by_one_line = {name: values for name, values in predictions.items() if name != "sex_specific"}

    def by(groups: list[str]) -> tuple[age_errors.GroupErrors, ...]:
        return age_errors.measure_group_errors(groups, test_ages, by_one_line, people)

    diagnoses = ages.column("test", "diagnosis")
    compared = test.raw if test.pooled is None else test.pooled
    gaps = age_errors.AgeGaps(compared - test_ages, test_ages, sexes, diagnoses, people)
    decades = [int(age // 10) * 10 for age in test_ages]
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
        median_mae=median_predictor_mae(
            torch.from_numpy(ages.known("train")), torch.from_numpy(test_ages)
        ),
        age_range=(float(test_ages.min()), float(test_ages.max())),
        by_sex=by(sexes),
        by_decade=by([f"{decade}–{decade + 9}" for decade in decades]),
        by_site=by(ages.column("test", "site")),
        by_diagnosis=by(diagnoses) if any(diagnoses) else (),
        diagnosis_gaps=age_errors.measure_diagnosis_gaps(
            gaps, ages.column("train", "diagnosis"), corrected=test.pooled is not None
        ),
        interval=fit_conformal_interval(ages, line),
        predictor_sha256=ages.sha256,
        points={"age": test_ages, "sex": sexes, "raw": test.raw, "pooled": test.pooled},
        absolute={name: np.abs(values - test_ages) for name, values in predictions.items()},
    )


def fit_conformal_interval(ages: ModelAges, line: CalibratorFit) -> ConformalInterval:
    """Fit the ± radius of ages corrected by ``line`` to validation errors; add test coverage."""
    # Volumes of one person are not exchangeable with other people's: only the first one counts.
    places = np.unique(ages.column("validation", "participant_id"), return_index=True)[1]
    residuals = ages.correct_split("validation", line.fitted).best - ages.known("validation")
    radius = conformal_radius(residuals[places], INTERVAL_LEVEL)
    errors = np.abs(ages.correct_split("test", line.fitted).best - ages.known("test"))
    coverage = None
    if radius is not None:
        coverage = Estimate.of(mean_share(errors <= radius, ages.data.test.people))
    method = "split conformal, |residuals| of one volume of each validation participant"
    if line.fitted is not None and line.split == "validation":
        # Residuals of the pairs that fitted the line are too small: the interval is too narrow.
        method += "; these also fitted the line"
    return ConformalInterval(
        level=INTERVAL_LEVEL, radius=radius, n=len(places), coverage=coverage, method=method
    )


def conformal_radius(residuals: np.ndarray, level: float) -> float | None:
    """Return half the width of the interval that covers new values with probability ≥ ``level``."""
    # It is the ⌈(n + 1)·level⌉-th smallest |residual| of (n,) residuals, one per participant, which
    # training must not have seen; None if n is too small (n < 9 for 90 %). Valid on average over
    # new volumes exchangeable with these, for any model (Lei et al. 2018, algorithm 2).
    # In floating point 10 · 0.9 may be 9.000000000000002, whose ceiling is 10.
    rank = math.ceil((len(residuals) + 1) * level - 1e-9)
    if rank > len(residuals):
        return None
    return float(np.sort(np.abs(residuals))[rank - 1])

"""Everything that the stage ``calibrate`` does for data whose labels are real numbers: correct, measure, and write what a user needs."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from moecore.calibration.linear import FittedLinear, Linear
from moecore.data.checksum import checksum
from moecore.data.prepared import SPLITS, Prepared
from moecore.evaluation.age_errors import age_table, decade, errors_by
from moecore.evaluation.conformal import conformal_radius, one_each
from moecore.evaluation.intervals import wilson
from moecore.evaluation.regression import median_mae
from moecore.files import StageError, whole_folder, write_json
from moecore.history_file import plain
from moecore.model_card import model_card
from moecore.predictions import Corrected, corrected, group_counts, prediction_rows, read_predictions, write_predictions
from moecore.reference import beyond_ages, reference_of, unlike

LEVEL = 0.9  # of the interval of a single prediction
OnRefusal = Literal["stop", "report"]


class Ages(NamedTuple):
    """One model's predictions of all splits, (N,) each in years, and what they are judged by."""

    data: Prepared
    predicted: Mapping[str, np.ndarray]  # by split
    subjects: Mapping[str, Sequence[Mapping[str, str]]]  # by split, in the same order
    sha256: str  # of the model.safetensors

    @classmethod
    def of(cls, data: Prepared, predicted: Mapping[str, np.ndarray], weights: Path) -> "Ages":
        """With subjects and the hash read from disk. Raises StageError for predictions that are NaN or infinite."""
        for split, values in predicted.items():
            if bad := int((~np.isfinite(values)).sum()):
                raise StageError(f"calibrate: {bad} of {len(values)} predictions of the split {split} are NaN or infinite; train the model again")
        return cls(data, predicted, {split: data.subjects(split) for split in SPLITS}, checksum(weights))

    def known(self, split: str) -> np.ndarray:
        return np.asarray(getattr(self.data, split).labels, np.float64)

    def column(self, split: str, name: str) -> list[str]:
        return [row[name] for row in self.subjects[split]]


class Fit(NamedTuple):
    """The calibrator, or why there is none, and how many pairs it was fitted to."""

    fitted: FittedLinear | None
    refused: str | None
    n: int


def fit(ages: Ages, calibrator: Linear, out_of_fold: Path, on_refusal: OnRefusal = "stop") -> Fit:
    """The calibrator fitted to the pairs that it names.

    out_of_fold: the predictions.csv of the stage ``out_of_fold``, read only where ``calibrator`` asks for it.
    Raises StageError where the fit is refused, unless ``on_refusal`` is "report": then the reason stands in the result.
    """
    predictions, known, sexes = _pairs(ages, calibrator, out_of_fold)
    try:
        return Fit(calibrator.fit(predictions, known, sexes, ages.sha256), None, len(known))
    except StageError as error:
        if on_refusal == "stop":
            raise
        warnings.warn(f"{error}. Nothing is corrected (calibrate.on_refusal: report)", stacklevel=2)
        return Fit(None, str(error), len(known))


def measured(ages: Ages, fit: Fit, fit_on: str, resamples: int) -> dict[str, Any]:
    """The content of the measured JSON, in JSON's types: table S1 with intervals, the median predictor, errors by group, and the points."""
    card, known, test = ages.data.card, ages.known("test"), _corrected(ages, "test", fit)
    variants = {name: values for name, values in zip(("raw", "pooled", "sex_specific"), test[:3], strict=True) if values is not None}
    people, sexes = ages.column("test", "participant_id"), ages.column("test", "sex")
    groups = {"by_sex": sexes, "by_decade": [decade(age) for age in known], "by_site": ages.column("test", "site")}
    table = dict.fromkeys(("pooled", "sex_specific")) | age_table(known, variants, people, resamples)
    return plain({
        "task": "regression", "target": card["target"], "unit": card["unit"], "data": card["name"], "simulated": card["simulated"],
        "n_test": len(known), "n_test_participants": len(set(people)), "n_fit": fit.n, "fit_on": fit_on, "refused": fit.refused,
        **table,
        "median_mae": median_mae(torch.from_numpy(ages.known("train")), torch.from_numpy(known)),
        "age_range": [float(known.min()), float(known.max())],
        **{name: errors_by(keys, known, variants, people, resamples) for name, keys in groups.items()},
        "interval": interval(ages, fit), "calibration": fit.fitted.model_dump() if fit.fitted else None,
        "calibration_groups": group_counts(test.groups), "predictor_sha256": ages.sha256,
        "points": {"age": known.tolist(), "sex": sexes, "raw": test.raw.tolist(), "pooled": None if test.pooled is None else test.pooled.tolist()},
    })  # fmt: skip


def interval(ages: Ages, fit: Fit) -> dict[str, Any]:
    """The conformal interval from the validation split: level, radius (years; None: too few), n, its method, and the share of test volumes inside."""
    places = one_each(ages.column("validation", "participant_id"))
    radius = conformal_radius((_corrected(ages, "validation", fit).best - ages.known("validation"))[places], LEVEL)
    errors = np.abs(_corrected(ages, "test", fit).best - ages.known("test"))
    covered = None if radius is None else wilson(int((errors <= radius).sum()), len(errors))
    seen = fit.fitted is not None and fit.fitted.fit_on == "validation"
    method = "split conformal, |residuals| of one volume of each validation participant" + ("; these also fitted the line" if seen else "")
    return {"level": LEVEL, "radius": radius, "n": len(places), "coverage": covered, "method": method}


def write(folder: Path, ages: Ages, fit: Fit, found: Mapping[str, Any], item: str) -> None:
    """Write calibrator.json (where there is one), reference.json, predictions.csv of all splits, and MODEL_CARD.md, all or nothing."""
    reference, radius = reference_of(ages.data) | {"interval": found["interval"], "predictor_sha256": ages.sha256}, found["interval"]["radius"]
    rows = []
    for split in SPLITS:
        known, volumes = _corrected(ages, split, fit), getattr(ages.data, split).images
        flags = [
            [*unlike(volume, reference), *beyond_ages(float(best), float(age), reference)]
            for volume, best, age in zip(volumes, known.best, ages.known(split), strict=True)
        ]
        rows += prediction_rows(ages.subjects[split], split, known, radius, flags)
    with whole_folder(folder) as target:
        if fit.fitted:
            (target / "calibrator.json").write_text(fit.fitted.to_json() + "\n", encoding="utf-8")
        write_json(target / "reference.json", plain(reference))
        write_predictions(target / "predictions.csv", rows)
        (target / "MODEL_CARD.md").write_text(model_card(ages.data.card, found, item), encoding="utf-8")


def _corrected(ages: Ages, split: str, fit: Fit) -> Corrected:
    return corrected(ages.predicted[split], ages.column(split, "sex"), fit.fitted)


def _pairs(ages: Ages, calibrator: Linear, out_of_fold: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Predictions, ages and sexes that the line is fitted to."""
    if calibrator.fit_on != "out_of_fold":
        return ages.predicted[calibrator.fit_on], ages.known(calibrator.fit_on), ages.column(calibrator.fit_on, "sex")
    rows = read_predictions(out_of_fold, ("participant_id", "session_id", "sex", "age", "predicted_age"))
    known = {(row["participant_id"], row["session_id"]) for row in ages.subjects["train"]}
    if {(row["participant_id"], row["session_id"]) for row in rows} != known:
        raise StageError(f"{out_of_fold}: its volumes are not those of the training split; run the stage `out_of_fold` again")
    columns = [np.array([float(row[name]) for row in rows]) for name in ("predicted_age", "age")]
    return *columns, [row["sex"] for row in rows]


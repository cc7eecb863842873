"""Curves over the seeds, for the page and for the CSV files that ``dvc plots`` reads."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moecore.evaluation.intervals import Interval, over_seeds, wilson
from moecore.files import StageError
from moecore.report.metrics_adversarial import WORST, attack_rows
from moecore.report.results import Measured, Results

Row = dict[str, Any]
TRAINING = ("step", "epoch", "train_loss", "train_accuracy", "validation_accuracy")
TRAINING_AGES = ("step", "epoch", "train_loss", "train_mae", "validation_mae")
ROBUSTNESS = ("attack", "epsilon", "accuracy", "low", "high")
ROBUSTNESS_AGES = ("attack", "epsilon", "mae", "low", "high")
TABLE_S1 = ("prediction", *(f"{name}{end}" for name in ("mae", "corr", "slope", "intercept") for end in ("", "_low", "_high")))


def robustness_rows(models: Sequence[Measured], attack: str, value: str = "accuracy") -> list[Row]:
    """epsilon, value, low, high for one method: means over seeds with Student's interval, Wilson's for one seed's accuracy.

    attack: a name, or ``worst_case``; [] for one that the models have nothing for.  value: ``accuracy``, ``mae`` or ``routing_change``
    (mean over layers).  Raises StageError where models met different attacks.
    """
    missing = attack != WORST and any(attack not in model.robustness["attacks"] for model in models)
    if missing:
        raise StageError(f"compare: artifacts/measured/robustness lacks the attack {attack} for a method or seed; run the stage `robustness` again")
    return [_row(rows, models, value) for rows in zip(*(attack_rows(model, attack) for model in models), strict=True)]


def _row(rows: Sequence[Mapping[str, Any]], models: Sequence[Measured], value: str) -> Row:
    if len(rows) == 1 and value == "accuracy":
        found = wilson(rows[0]["correct"], models[0].robustness["images"])
    elif len(rows) == 1 and value == "mae":
        found = Interval(rows[0]["mae"], rows[0]["low"], rows[0]["high"])
    else:
        found = over_seeds([sum(row[value]) / len(row[value]) if isinstance(row[value], list) else row[value] for row in rows])
    low, high = (found.value, found.value) if found.low is None else (max(0.0, found.low), found.high if value == "mae" else min(1.0, found.high))
    return {"epsilon": rows[0]["epsilon"], "value": found.value, "low": low, "high": high}


def training_csv(results: Results) -> str:
    """Every logged point of every training: phase, method, seed, step, epoch, losses and accuracies (errors in years, of ages)."""
    return _csv(("phase", "method", "seed", *_columns(results, TRAINING, TRAINING_AGES)), ({**item, **row} for item, model in _models(results) for row in model.trained["curve"]))


def robustness_csv(results: Results) -> str:
    """Every attack of every model: phase, method, seed, attack, epsilon, accuracy (mae, of ages) with its limits; no rows where nothing was attacked."""
    attacks = ((item, name, rows) for item, model in _models(results) for name, rows in model.robustness.get("attacks", {}).items())
    rows = ({**item, "attack": name, **row} for item, name, rows in attacks for row in rows or ())
    return _csv(("phase", "method", "seed", *_columns(results, ROBUSTNESS, ROBUSTNESS_AGES)), rows)


def table_s1_csv(results: Results) -> str:
    """Every kind of prediction (raw, pooled, sex_specific) of every model: mae, corr, slope and intercept with their limits."""
    return _csv(("phase", "method", "seed", *TABLE_S1), ({**item, **row} for item, model in _models(results) for row in _s1_rows(model)))


def _s1_rows(model: Measured) -> Iterator[Row]:
    for name in ("raw", "pooled", "sex_specific"):
        if found := model.calibrate.get(name):
            limits = {f"{key}{end}": found[key][part] for key in found for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))}
            yield {"prediction": name, **limits}


def _columns(results: Results, classes: tuple[str, ...], ages: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that the phases of the study need: those of classes, of ages, or both."""
    kinds = {"test_mae" in model.trained for _, model in _models(results)}
    return tuple(dict.fromkeys((*(classes if False in kinds else ()), *(ages if True in kinds else ()))))


def _models(results: Results) -> Iterator[tuple[Row, Measured]]:
    for phase, methods in results.models.items():
        for method, seeds in methods.items():
            for seed, model in seeds.items():
                yield {"phase": phase, "method": method, "seed": seed}, model


def _csv(columns: Sequence[str], rows: Iterator[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

"""Fit a calibrator; measure confidence (of classes) or errors (of ages) before and after on the test split.

    python -m stages.calibrate <phase> <method> <seed>
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.artifacts import load_model
from moecore.calibrated_ages import Ages, OnRefusal, fit, measured, write
from moecore.calibration import Calibrator
from moecore.config import Config
from moecore.data.prepared import SPLITS, Prepared
from moecore.evaluation.classification import brier, confidence, correct, ece, nll, reliability
from moecore.evaluation.intervals import Interval, bootstrap, wilson
from moecore.evaluation.predict import predictions
from moecore.evaluation.robust import packed
from moecore.files import StageError, whole_file
from moecore.history import Run, record
from moecore.params import read
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


class Calibrate(Config):
    """What is fitted, and how many images a forward pass takes."""

    calibrator: Calibrator
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    resamples: int = Field(1000, ge=100, description="Bootstrap resamples of the test images behind every interval.")
    on_refusal: OnRefusal = Field("stop", description="Where no line can be fitted (linear): stop, or report the predictions as they are.")


class Params(Config):
    calibrate: Calibrate


def measure(logits: Tensor, labels: Tensor, resamples: int) -> dict[str, Any]:
    """Accuracy (Wilson), NLL, Brier and ECE (bootstrap) with intervals, and the reliability bins."""
    sure, hits = confidence(logits), correct(logits, labels)
    losses, squares = nll(logits, labels).numpy(), brier(logits, labels).numpy()

    def resampled(statistic: Callable[[np.ndarray], float]) -> Interval:
        return bootstrap(statistic, len(labels), resamples, lowest=0.0)

    return {
        "accuracy": wilson(int(hits.sum()), len(labels)),
        "nll": resampled(lambda chosen: float(losses[chosen].mean())),
        "brier": resampled(lambda chosen: float(squares[chosen].mean())),
        "ece": resampled(lambda chosen: ece(sure[chosen], hits[chosen])),
        "bins": reliability(sure, hits),
    }


def calibrate(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    data = Prepared.open(Path("artifacts/data") / phase)
    check_kind(params.calibrate, data, phase)
    with record("calibrate", params, phase=phase, method=method, seed=seed) as run:
        (of_ages if data.real else of_classes)(run, params.calibrate, data, Path(phase) / method / str(seed))


def check_kind(settings: Calibrate, data: Prepared, phase: Phase) -> None:
    """Raise StageError where the calibrator is none for these labels."""
    if data.multi_label:
        allowed = f"phases whose images have one (leave {phase} out of run.phases)"
        raise StageError(f"calibrate: the images of data.{phase} have several labels each; allowed: {allowed}")
    found, allowed, what = settings.calibrator.kind, *(("linear", "real numbers") if data.real else ("temperature", "classes"))
    if found != allowed:
        raise StageError(f"calibrate.calibrator.kind: found {found}; the labels of data.{phase} are {what}; allowed: {allowed}")


def of_classes(run: Run, settings: Calibrate, data: Prepared, item: Path) -> None:
    """One temperature from the validation split; accuracy, NLL, Brier and ECE before and after."""
    model = load_model(Path("artifacts") / item).to(tune().device)
    validation, _ = predictions(model, data.validation.images, settings.batch, routing=False)
    test, _ = predictions(model, data.test.images, settings.batch, routing=False)
    fitted = settings.calibrator.fit(validation, labels_of(data.validation.labels))
    with whole_file(Path("artifacts/calibrate") / item / "calibrator.json") as path:
        path.write_text(fitted.to_json() + "\n", encoding="utf-8")
    labels = labels_of(data.test.labels)
    found = {when: measure(logits, labels, settings.resamples) for when, logits in (("before", test), ("after", fitted.apply(test)))}
    run.draw("reliability_diagram", {when: values["bins"] for when, values in found.items()})
    counts = {"validation_images": len(validation), "test_images": len(test), "hits": packed(correct(test, labels))}
    run.summary({**fitted.model_dump(), **counts, **found})


def of_ages(run: Run, settings: Calibrate, data: Prepared, item: Path) -> None:
    """A line from the split that the calibrator names; table S1, predictions.csv, the card of the model."""
    model = load_model(Path("artifacts") / item).to(tune().device)
    predicted = {split: predictions(model, getattr(data, split).images, settings.batch, routing=False)[0][:, 0].double().numpy() for split in SPLITS}
    ages = Ages.of(data, predicted, Path("artifacts") / item / "model.safetensors")
    line = fit(ages, settings.calibrator, Path("artifacts/out_of_fold") / item / "predictions.csv", settings.on_refusal)
    found = measured(ages, line, settings.calibrator.fit_on, settings.resamples)
    write(Path("artifacts/calibrate") / item, ages, line, found, item.as_posix())
    draw(run, found)
    run.table("table_s1", [{"prediction": name, **found[name]} for name in ("raw", "pooled", "sex_specific") if found[name]])
    run.summary(found)


def draw(run: Run, found: dict[str, Any]) -> None:
    """The figures of predicted ages; drawings are imported late, as they are no input of a result."""
    figures, simulated = importlib.import_module("moecore.report.figures_age"), found["simulated"]
    run.figure("age_scatter", figures.age_scatter(found["points"], simulated=simulated))
    run.figure("pad_against_age", figures.pad_against_age(found["points"], simulated=simulated))
    panels = {name: found[f"by_{name}"] for name in ("decade", "sex", "site")}
    run.figure("errors_by_group", figures.errors_by_group(panels, simulated=simulated))


def labels_of(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(labels))


if __name__ == "__main__":
    run_stage(calibrate)

"""Fit a calibrator on the validation split; measure confidence before and after on the test split.

    python -m stages.calibrate <phase> <method> <seed>
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.artifacts import load_model
from moecore.calibration import Calibrator
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.evaluation.classification import brier, confidence, correct, ece, nll, reliability
from moecore.evaluation.intervals import Interval, bootstrap, wilson
from moecore.evaluation.predict import predictions
from moecore.evaluation.robust import packed
from moecore.files import StageError, whole_file
from moecore.history import record
from moecore.params import read
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


class Calibrate(Config):
    """What is fitted, and how many images a forward pass takes."""

    calibrator: Calibrator
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    resamples: int = Field(1000, ge=100, description="Bootstrap resamples of the test images behind every interval.")


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
    settings, item = params.calibrate, Path(phase) / method / str(seed)
    data = Prepared.open(Path("artifacts/data") / phase)
    if data.multi_label:
        allowed = f"phases whose images have one (leave {phase} out of run.phases)"
        raise StageError(f"calibrate: the images of data.{phase} have several labels each; allowed: {allowed}")
    with record("calibrate", params, phase=phase, method=method, seed=seed) as run:
        model = load_model(Path("artifacts") / item).to(tune().device)
        validation, _ = predictions(model, data.validation.images, settings.batch, routing=False)
        test, _ = predictions(model, data.test.images, settings.batch, routing=False)
        fitted = settings.calibrator.fit(validation, labels_of(data.validation.labels))
        with whole_file(Path("artifacts/calibrate") / item / "calibrator.json") as path:
            path.write_text(fitted.to_json() + "\n", encoding="utf-8")
        labels = labels_of(data.test.labels)
        measured = {when: measure(logits, labels, settings.resamples) for when, logits in (("before", test), ("after", fitted.apply(test)))}
        run.draw("reliability_diagram", {when: values["bins"] for when, values in measured.items()})
        counts = {"validation_images": len(validation), "test_images": len(test), "hits": packed(correct(test, labels))}
        run.summary({**fitted.model_dump(), **counts, **measured})


def labels_of(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(labels))


if __name__ == "__main__":
    run_stage(calibrate)

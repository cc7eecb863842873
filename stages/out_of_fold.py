"""Predict every training volume by a model that never saw its participant, for a calibration that is fitted on such predictions.

    python -m stages.out_of_fold <method> <seed>

Trains ``folds`` models like stages.pretrain, each without one fold of the training split, and keeps their predictions only.
Where the calibration is fitted on other predictions nothing is trained, and absent.json says so.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import nn

from moecore.backbones import Backbone
from moecore.backbones.image import ImageSpec
from moecore.calibration import Calibrator
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.evaluation.predict import predictions
from moecore.files import StageError, whole_folder, write_json
from moecore.folds import folds_of
from moecore.history import Run, record
from moecore.params import Key, read
from moecore.predictions import corrected, prediction_rows, write_predictions
from moecore.progress import progress
from moecore.resume import work_folder
from moecore.stage import run_stage
from moecore.supervise import task_for
from moecore.training.checkpoint import Checkpoint
from moecore.training.isolation import isolation
from moecore.training.loop import fit, total_steps
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.runtime import Runtime, tune
from moecore.training.settings import Training

DATA = Path("artifacts/data/pretrain")


class OutOfFold(Config):
    """How many models share the training split."""

    folds: int = Field(5, ge=2, description="Models that are trained, each without one part of the participants.")
    batch: int = Field(8, ge=1, description="Volumes a forward pass; no result depends on it.")


class Params(Config):
    model: Backbone
    pretrain: Training
    method: Annotated[Method, Key("methods.{method}")]
    calibrator: Annotated[Calibrator, Key("calibrate.calibrator")]
    out_of_fold: OutOfFold = OutOfFold()

    @property
    def wanted(self) -> bool:
        """Whether the calibration is fitted on out-of-fold predictions."""
        return self.calibrator.kind == "linear" and self.calibrator.fit_on == "out_of_fold"


def checked(data: Prepared, method: Method) -> None:
    """Raise StageError for classes, and for a method whose teacher has seen the volumes that are held out."""
    if not data.real:
        raise StageError("out_of_fold: data.pretrain has classes; allowed: a cohort whose labels are real numbers")
    if method.guided or method.upcycle:
        raise StageError("out_of_fold: the method learns from a teacher that saw all training volumes; allowed: methods without a teacher")


def without(params: Params, data: Prepared, kept: np.ndarray, seed: int, runtime: Runtime, work: Path, title: str) -> nn.Module:
    """The model trained on the volumes ``kept`` (indices) of the training split, as stages.pretrain trains on all of them."""
    learned, settings = params.method, params.pretrain
    torch.manual_seed(seed)
    model = learned.sized(params.model).build(ImageSpec.from_card(data.card), learned.moe)
    objective = Objective(learned.losses, settings.label_smoothing, learned.distillation)
    task = task_for(model, data, objective, runtime, None, kept, learned.views, isolation(learned, data, kept), seed if learned.permuted else None)
    work.mkdir(exist_ok=True)
    with progress(title, total_steps(task, settings)) as bar:
        for metrics in fit(task, settings, seed, runtime, Checkpoint(work)):
            bar.update(metrics.step)
    return task.model


def held_out(params: Params, data: Prepared, folds: np.ndarray, seed: int, work: Path, run: Run, title: str) -> np.ndarray:
    """Predictions (N,) of the training volumes, each by the model of its fold."""
    runtime, found = tune(), np.full(len(folds), np.nan)
    for fold in range(params.out_of_fold.folds):
        out = np.flatnonzero(folds == fold)
        model = without(params, data, np.flatnonzero(folds != fold), seed, runtime, work / f"fold_{fold}", f"{title} fold {fold}")
        found[out] = predictions(model, data.train.images[out], params.out_of_fold.batch, routing=False)[0][:, 0].double().numpy()
        run.log(fold, {"mae": float(np.abs(found[out] - data.train.labels[out]).mean())})
    return found


def out_of_fold(method: str, seed: int) -> None:
    params = read(Params, method=method)
    item = f"pretrain/{method}/{seed}"
    where = f"out_of_fold/{item}"
    with work_folder(where, params, [DATA], __file__) as work, record("out_of_fold", params, phase="pretrain", method=method, seed=seed, work=work) as run:
        if not params.wanted:
            with whole_folder(Path("artifacts") / where) as folder:
                write_json(folder / "absent.json", {"calibrator": params.calibrator.model_dump(mode="json")})
            run.summary({})
            return
        data = Prepared.open(DATA)
        checked(data, params.method)
        subjects = data.subjects("train")
        folds = folds_of([row["participant_id"] for row in subjects], data.train.labels, params.out_of_fold.folds, seed)
        found = held_out(params, data, folds, seed, work, run, f"out_of_fold {method} seed {seed}")
        said = corrected(found, [row["sex"] for row in subjects], None)
        with whole_folder(Path("artifacts") / where) as folder:
            write_predictions(folder / "predictions.csv", prediction_rows(subjects, "train", said, None, [[f"fold {fold}"] for fold in folds]))
        run.summary({"folds": params.out_of_fold.folds, "n": len(found), "mae": float(np.abs(found - data.train.labels).mean())})


if __name__ == "__main__":
    run_stage(out_of_fold)

"""Predict every training volume by a model that never saw its participant, to fit calibrators."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field

from moecore.brain.prediction_table import correct_ages, prediction_rows, write_predictions
from moecore.core.config import Config
from moecore.core.files import UserError, whole_folder
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.nn.predict import predict_in_batches
from moecore.training.checkpoint import Checkpoint, Inputs
from moecore.training.job import Objective, TrainingJob, build_training_job
from moecore.training.loop import Metrics, iterate_training, total_steps
from moecore.training.method import Method
from moecore.training.runtime import Runtime
from moecore.training.settings import Training
from moecore.training.single_tissue_volumes import build_tissue_isolation

BATCH = 8  # volumes per forward pass
# Runs the training of a fold: called with the fold, its number of steps, and the metrics iterator.
Follow = Callable[[int, int, Iterator[Metrics]], None]
Log = Callable[[int, dict[str, float]], None]  # one point per name, at a step


class OutOfFold(Config):
    """Settings of out-of-fold predictions."""

    folds: int = Field(
        5, ge=2, description="Number of models, each trained without one part of the participants."
    )


class FoldRecipe(NamedTuple):
    """Recipe of each fold's training, equal to the stage ``pretrain`` except for its volumes."""

    backbone: Backbone
    training: Training
    method: Method
    folds: int
    seed: int


class OutOfFoldResult(Config):
    """The error over all training volumes."""

    mae: float  # years


def train_and_predict_folds(
    recipe: FoldRecipe,
    data: Prepared,
    runtime: Runtime,
    work: Path,  # checkpoints, from which a killed process continues
    out: Path,  # the written folder
    follow: Follow,  # runs the training of a fold
    log: Log,  # receives the MAE of each fold
    inputs: Inputs | None = None,
) -> OutOfFoldResult:
    """Train one model per fold without its volumes, predict them, and write predictions.csv."""
    if recipe.method.guided or recipe.method.upcycle:
        raise UserError(
            "out_of_fold: the method learns from a teacher that saw all training volumes; allowed: "
            "methods without a teacher"
        )
    subjects = data.subjects("train")
    ages = data.train.labels
    people = [subject["participant_id"] for subject in subjects]
    fold = assign_folds(people, ages, recipe.folds, recipe.seed)
    predicted = np.full(len(fold), np.nan)
    for number in range(recipe.folds):
        job = build_fold_job(recipe, data, np.flatnonzero(fold != number), runtime)
        home = work / f"fold_{number}"
        home.mkdir(exist_ok=True)
        checkpoint = Checkpoint(home, inputs)
        learning = iterate_training(job, recipe.training, recipe.seed, runtime, checkpoint)
        follow(number, total_steps(job, recipe.training), learning)
        held_out = np.flatnonzero(fold == number)
        volumes = data.train.images[held_out]
        answers, _ = predict_in_batches(job.model, volumes, BATCH, routing=False)
        predicted[held_out] = answers[:, 0].double().numpy()
        log(number, {"mae": float(np.abs(predicted[held_out] - ages[held_out]).mean())})
    flags = [[f"fold {number}"] for number in fold]
    rows = prediction_rows(subjects, "train", correct_ages(predicted, [], None), None, flags)
    with whole_folder(out) as folder:
        write_predictions(folder / "predictions.csv", rows)
    return OutOfFoldResult(mae=float(np.abs(predicted - ages).mean()))


def build_fold_job(
    recipe: FoldRecipe, data: Prepared, rows: np.ndarray, runtime: Runtime
) -> TrainingJob:
    """Return the training job of one fold; rows: indices of its volumes in the training split."""
    method = recipe.method
    torch.manual_seed(recipe.seed)
    model = method.merge_model_settings(recipe.backbone).build(
        ImageSpec.from_card(data.card), method.moe
    )
    return build_training_job(
        model,
        data,
        Objective(method.losses, recipe.training.label_smoothing, method.distillation),
        runtime.device,
        subset=rows,
        views=method.views,
        isolation=build_tissue_isolation(method, data, rows),
        permuted=recipe.seed if method.permuted else None,
    )


def assign_folds(
    participants: Sequence[str], ages: np.ndarray, folds: int, seed: int
) -> np.ndarray:
    """Return the number of the fold that each volume is held out in, int64 (N,)."""
    # Participants are sorted by mean age; each ``folds`` neighbours are shuffled over the folds.
    names, person = np.unique(np.array(participants, dtype=str), return_inverse=True)
    if len(names) < folds:
        allowed = f"at most {len(names)}, the participants of the training split"
        raise UserError.at("out_of_fold.folds", found=folds, allowed=allowed)
    means = np.bincount(person, weights=np.asarray(ages, np.float64)) / np.bincount(person)
    generator = np.random.default_rng(seed)
    fold = np.empty(len(names), np.int64)
    order = np.argsort(means, kind="stable")
    for start in range(0, len(order), folds):
        group = order[start : start + folds]
        fold[group] = generator.permutation(folds)[: len(group)]
    return fold[person]

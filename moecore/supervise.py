"""A training run that is watched: progress, history, checkpoints, and what is reported of the trained model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moecore.data.loader import to_device
from moecore.data.prepared import Prepared, Split
from moecore.epochs import keep_routing
from moecore.evaluation.classification import confusion, correct, nll
from moecore.evaluation.intervals import bootstrap_mean
from moecore.evaluation.multi_label import false_discovery_rate
from moecore.evaluation.predict import predictions
from moecore.evaluation.regression import absolute_error, age_fit, median_mae
from moecore.history import Run
from moecore.history_file import points, read_lines, seconds
from moecore.parameters import parameter_counts
from moecore.progress import progress
from moecore.records import real
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import Guide, standing_alone
from moecore.training.isolation import Isolation
from moecore.training.loop import Metrics, Task, fit, total_steps
from moecore.training.objective import Objective
from moecore.training.runtime import Runtime
from moecore.training.settings import Training

PERMUTED = 4  # of the random streams of a seed: the places of a null control's labels


def task_for(
    model: nn.Module, data: Prepared, objective: Objective, runtime: Runtime, guide: Guide | None = None,
    subset: np.ndarray | None = None, views: int = 1, isolation: Isolation | None = None, permuted: int | None = None,
) -> Task:  # fmt: skip
    """The training task of ``model`` on prepared data; ``subset``: indices of the training images that are used; ``views`` of each.

    ``isolation``: which of them keep one tissue. ``permuted``: the seed of a null control, whose training labels change places.
    """
    train = data.train if subset is None else Split(data.train.images[subset], data.train.labels[subset])
    if permuted is not None:
        train = Split(train.images, np.random.default_rng([permuted, PERMUTED]).permutation(train.labels))
    guide = None if guide is None else guide.to(runtime.device)
    splits = (to_device(split, runtime.device) for split in (train, data.validation))
    return Task(model, len(data.card["classes"]), *splits, objective, guide, views, isolation)


def train(
    task: Task, settings: Training, seed: int, runtime: Runtime, run: Run, checkpoint: Checkpoint, title: str, probe: Callable[[int], None] | None = None
) -> None:
    """Train from the last checkpoint, with a progress bar, every point going to the run's history; ``probe`` is told every epoch (from 1) that ends."""
    for name, value in runtime._asdict().items():
        run.tag(f"runtime.{name}", value)
    with progress(title, total_steps(task, settings)) as bar:
        for metrics in fit(task, settings, seed, runtime, checkpoint):
            run.log(metrics.step, metrics.values | {"epoch": metrics.epoch})
            if task.model.moe is not None and metrics.epoch == int(metrics.epoch):
                keep_routing(checkpoint.path.parent, int(metrics.epoch), standing_alone(task.model, task.guide), task.validation, task.classes)
                if probe is not None:
                    probe(int(metrics.epoch))
            bar.update(metrics.step, **_shown(metrics))


def trained(model: nn.Module, data: Prepared, settings: Training, run: Run) -> dict[str, Any]:
    """What is reported of a trained model: the test split is looked at once, here; the curve comes from the run's history.

    Where images have several labels, all that is called accuracy is precision at 1 (``measure`` says so), and there is no confusion;
    for real labels it is the mean absolute error, in their unit.
    """
    lines = read_lines(run.folder)
    curve = [{"step": step, "train_loss": values["task"], **values} for step, _, values in points(lines)]
    labels = torch.from_numpy(np.array(data.test.labels))
    prediction, _ = predictions(model, data.test.images, batch=500, routing=False)
    run.draw("training_curves", {"this run": [curve]})
    found = _of_numbers(model, prediction, labels, data) if real(labels) else _of_classes(prediction, labels, data, curve, run)
    return found | {
        "test_count": len(labels), "epochs": settings.epochs, "images_per_second": float(np.median([point["images_per_second"] for point in curve])),
        "seconds": seconds(lines), **parameter_counts(model), "curve": curve, "classes": data.card["classes"],
    }  # fmt: skip


def _of_classes(logits: Tensor, labels: Tensor, data: Prepared, curve: list[dict], run: Run) -> dict[str, Any]:
    hits, several = correct(logits, labels), data.multi_label
    matrix = None if several else confusion(logits, labels).tolist()
    if matrix is not None:
        run.draw("confusion_matrix", matrix, data.card["classes"])
    found = {"measure": "precision_at_1", "false_discovery_rate": false_discovery_rate(logits, labels)} if several else {"measure": "accuracy"}
    return found | {
        "test_accuracy": float(hits.double().mean()), "test_correct": int(hits.sum()), "test_loss": float(nll(logits, labels).mean()),
        "validation_accuracy": curve[-1]["validation_accuracy"], "confusion": matrix,
    }  # fmt: skip


def _of_numbers(model: nn.Module, prediction: Tensor, labels: Tensor, data: Prepared) -> dict[str, Any]:
    """Errors in the target's unit, with bootstrap intervals over images; the loss is in deviations of the training labels, as in training."""
    errors, seen = absolute_error(prediction, labels), torch.from_numpy(np.array(data.validation.labels))
    validation = absolute_error(predictions(model, data.validation.images, batch=500, routing=False)[0], seen)
    fit = age_fit(prediction, labels)
    return {
        "measure": "mae", "target": data.card["target"], "unit": data.card["unit"], "test_mae": _mean(errors), "validation_mae": _mean(validation),
        "test_loss": float(errors.mean()) / data.card["target_std"], "median_mae": median_mae(torch.from_numpy(np.array(data.train.labels)), labels),
        "test_corr": fit["corr"], "test_slope": fit["slope"], "test_intercept": fit["intercept"],
    }  # fmt: skip


def _mean(errors: Tensor) -> dict[str, float]:
    """The mean of (N,) and the limits of its bootstrap interval."""
    return bootstrap_mean(errors.numpy())._asdict()


def _shown(metrics: Metrics) -> dict[str, float]:
    return {name: metrics.values[name] for name in ("loss", "train_accuracy", "validation_accuracy", "train_mae", "validation_mae") if name in metrics.values}

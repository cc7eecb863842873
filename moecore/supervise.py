"""A training run that is watched: progress, history, checkpoints, and what is reported of the trained model."""

from typing import Any

import numpy as np
import torch
from torch import nn

from moecore.data.loader import to_device
from moecore.data.prepared import Prepared, Split
from moecore.epochs import keep_routing
from moecore.evaluation.classification import confusion, correct, nll
from moecore.evaluation.multi_label import false_discovery_rate
from moecore.evaluation.predict import predictions
from moecore.history import Run
from moecore.history_file import points, read_lines, seconds
from moecore.parameters import parameter_counts
from moecore.progress import progress
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import Guide, standing_alone
from moecore.training.loop import Metrics, Task, fit, total_steps
from moecore.training.objective import Objective
from moecore.training.runtime import Runtime
from moecore.training.settings import Training


def task_for(
    model: nn.Module, data: Prepared, objective: Objective, runtime: Runtime, guide: Guide | None = None,
    subset: np.ndarray | None = None, views: int = 1,
) -> Task:  # fmt: skip
    """The training task of ``model`` on prepared data; ``subset``: indices of the training images that are used; ``views`` of each."""
    train = data.train if subset is None else Split(data.train.images[subset], data.train.labels[subset])
    guide = None if guide is None else guide.to(runtime.device)
    return Task(model, len(data.card["classes"]), to_device(train, runtime.device), to_device(data.validation, runtime.device), objective, guide, views)


def train(task: Task, settings: Training, seed: int, runtime: Runtime, run: Run, checkpoint: Checkpoint, title: str) -> None:
    """Train from the last checkpoint, with a progress bar, every point going to the run's history."""
    for name, value in runtime._asdict().items():
        run.tag(f"runtime.{name}", value)
    with progress(title, total_steps(task, settings)) as bar:
        for metrics in fit(task, settings, seed, runtime, checkpoint):
            run.log(metrics.step, metrics.values | {"epoch": metrics.epoch})
            if task.model.moe is not None and metrics.epoch == int(metrics.epoch):
                keep_routing(checkpoint.path.parent, int(metrics.epoch), standing_alone(task.model, task.guide), task.validation, task.classes)
            bar.update(metrics.step, **_shown(metrics))


def trained(model: nn.Module, data: Prepared, settings: Training, run: Run) -> dict[str, Any]:
    """What is reported of a trained model: the test split is looked at once, here; the curve comes from the run's history.

    Where images have several labels, all that is called accuracy is precision at 1 (``measure`` says so), and there is no confusion.
    """
    lines = read_lines(run.folder)
    curve = [{"step": step, "train_loss": values["task"], **values} for step, _, values in points(lines)]
    labels = torch.from_numpy(np.array(data.test.labels))
    logits, _ = predictions(model, data.test.images, batch=500, routing=False)
    hits, several = correct(logits, labels), data.multi_label
    matrix = None if several else confusion(logits, labels).tolist()
    run.draw("training_curves", {"this run": [curve]})
    if matrix is not None:
        run.draw("confusion_matrix", matrix, data.card["classes"])
    found = {"measure": "precision_at_1", "false_discovery_rate": false_discovery_rate(logits, labels)} if several else {"measure": "accuracy"}
    return found | {
        "test_accuracy": float(hits.double().mean()), "test_correct": int(hits.sum()), "test_count": len(labels),
        "test_loss": float(nll(logits, labels).mean()), "validation_accuracy": curve[-1]["validation_accuracy"],
        "epochs": settings.epochs, "images_per_second": float(np.median([point["images_per_second"] for point in curve])),
        "seconds": seconds(lines), **parameter_counts(model), "curve": curve, "confusion": matrix, "classes": data.card["classes"],
    }  # fmt: skip


def _shown(metrics: Metrics) -> dict[str, float]:
    return {name: metrics.values[name] for name in ("loss", "train_accuracy", "validation_accuracy") if name in metrics.values}

"""How numbers of a history are called in MLflow.

Its page of charts makes a section of what stands before the last slash of a name: ``loss/``,
``train/``, ``validation/``, ``test/`` and ``routing/`` of trainings, then one section per
measurement; of parents one per phase. What is counted (images, parameters) is a param: its chart
would be one flat bar.
"""

import re
from collections.abc import Mapping
from typing import Any

from moecore.run.history_file import logged_points, routing_points
from moecore.study.stages import MODEL_STAGES

PACE = ("epoch", "learning_rate", "images_per_second", "memory_mb")  # beside a training's scores
GROUPS = {"calibrate": "calibration", "teacher_router": "loss"}  # of stages, where not their name
Point = tuple[str, float, int, int]  # name, value, milliseconds, step


def mlflow_safe_name(name: str) -> str:
    """Return a name that MLflow accepts (``@`` is not allowed)."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def curve_points(lines: list[dict]) -> list[Point]:
    """Return the points that a history logged."""
    return [
        (mlflow_safe_name(curve_name(name)), value, int(t * 1000), step)
        for step, t, values in logged_points(lines)
        for name, value in values.items()
    ]


def routing_curve_points(lines: list[dict]) -> list[Point]:
    """Return what a training saw of its routing: a curve for each MoE layer and quantity."""
    return [
        (f"routing/{name}", float(value), int(t * 1000), point.step)
        for t, point in routing_points(lines)
        for name, value in point.curve_values().items()
        if value is not None
    ]


def parent_run_points(lines: list[dict], phase: str) -> list[Point]:
    """Return those of a training that its parent shows, ``validation/pretrain accuracy``."""
    pace = [f"train/{name}" for name in PACE]
    return [
        (name.replace("/", f"/{phase} ", 1), value, at, step)
        for name, value, at, step in curve_points(lines)
        if name in ("loss/total", "loss/task")
        or (not name.startswith("loss/") and name not in pace)
    ]


def curve_name(name: str) -> str:
    """Return ``train/accuracy``, ``validation/loss``; the terms of the loss are ``loss/…``."""
    group, _, words = name.partition("_")
    if group in ("train", "validation"):
        return f"{group}/{words}"
    if name in PACE:
        return f"train/{name}"
    return "loss/total" if name == "loss" else f"loss/{name}"


def stage_metrics_and_params(
    stage: str, summary: Mapping[str, Any]
) -> tuple[dict[str, float], dict]:
    """Return the result of a stage, without limits: what is drawn, and what is only listed."""
    metrics: dict[str, float] = {}
    params: dict[str, Any] = {}
    for name, value in summary.items():
        group = GROUPS.get(stage, stage)
        words = re.sub(r"\.(value|median)$", "", name)
        if stage in MODEL_STAGES:
            own, _, rest = words.partition("_")
            tested = own in ("test", "validation")
            group, words = (own, rest) if tested else ("train", f"{words} overall")
        if isinstance(value, int) and name != "test_correct":
            params[f"{stage}.{name}"] = value
        elif value is not None and not name.endswith((".low", ".high")):
            metrics[mlflow_safe_name(f"{group}/{words}")] = float(value)
    return metrics, params

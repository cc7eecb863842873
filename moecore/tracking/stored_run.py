"""Send missing values to a run of MLflow's store, and name the values of histories there.

In MLflow's charts, the part of a name before the last slash is a section: ``loss/``, ``train/``,
``validation/``, ``test/`` and ``routing/`` of trainings, then one section per measurement; in
parent runs one per phase. Counts (images, parameters) are params, as a chart would not help.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from moecore.run.history_file import logged_points, routing_points
from moecore.study.stages import MODEL_STAGES

PACE = ("epoch", "learning_rate", "images_per_second", "memory_mb")  # not scores of a training
GROUPS = {"calibrate": "calibration", "teacher_router": "loss"}  # stage → section, if not its name
Point = tuple[str, float, int, int]  # name, value, milliseconds, step


def mlflow_safe_name(name: str) -> str:
    """Return a name that MLflow accepts (``@`` is not allowed)."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def curve_points(lines: list[dict]) -> list[Point]:
    return [
        (mlflow_safe_name(curve_name(name)), value, int(t * 1000), step)
        for step, t, values in logged_points(lines)
        for name, value in values.items()
    ]


def routing_curve_points(lines: list[dict]) -> list[Point]:
    """Return a training's routing: one curve per MoE layer and quantity."""
    return [
        (f"routing/{name}", float(value), int(t * 1000), point.step)
        for t, point in routing_points(lines)
        for name, value in point.curve_values().items()
        if value is not None
    ]


def parent_run_points(lines: list[dict], phase: str) -> list[Point]:
    """Return the points that a training's parent shows, as ``validation/pretrain accuracy``."""
    pace = [f"train/{name}" for name in PACE]
    return [
        (name.replace("/", f"/{phase} ", 1), value, at, step)
        for name, value, at, step in curve_points(lines)
        if name in ("loss/total", "loss/task")
        or (not name.startswith("loss/") and name not in pace)
    ]


def curve_name(name: str) -> str:
    """Return ``train/accuracy``, ``validation/loss`` or, for terms of the loss, ``loss/…``."""
    group, _, quantity = name.partition("_")
    if group in ("train", "validation"):
        return f"{group}/{quantity}"
    if name in PACE:
        return f"train/{name}"
    return "loss/total" if name == "loss" else f"loss/{name}"


def stage_metrics_and_params(
    stage: str, summary: Mapping[str, Any]
) -> tuple[dict[str, float], dict]:
    """Return the result of a stage without interval limits: charted metrics, and listed params."""
    metrics: dict[str, float] = {}
    params: dict[str, Any] = {}
    for name, value in summary.items():
        group = GROUPS.get(stage, stage)
        title = re.sub(r"\.(value|median)$", "", name)
        if stage in MODEL_STAGES:
            split, _, rest = title.partition("_")
            tested = split in ("test", "validation")
            group, title = (split, rest) if tested else ("train", f"{title} overall")
        if isinstance(value, int) and name != "test_correct":
            params[f"{stage}.{name}"] = value
        elif value is not None and not name.endswith((".low", ".high")):
            metrics[mlflow_safe_name(f"{group}/{title}")] = float(value)
    return metrics, params


UID = "moecore.uid"
PARENT = "mlflow.parentRunId"
LEVEL = "level"  # "method": a parent; "shared": the parent of shared stages; "stage": a child
MAX_TAG = 5000  # letters
MAX_PARAM = 500


class StoredRun:
    """A run with a copy of its content; sending values twice does no harm."""

    def __init__(self, client: Any, run: Any) -> None:
        self.client = client
        self.id: str = run.info.run_id
        self.status: str = run.info.status
        self.started: float = run.info.start_time / 1000  # seconds since 1970
        self.ended: float = (run.info.end_time or 0) / 1000
        self.tags: dict[str, str] = dict(run.data.tags)
        self.params = set(run.data.params)
        self.metrics: dict[str, float] = dict(run.data.metrics)  # the latest values
        self.models: set[str] = set()
        if run.outputs:
            self.models = {model.model_id for model in run.outputs.model_outputs}

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set the tags that differ, except those with the value None."""
        from mlflow.entities import RunTag

        texts = {
            mlflow_safe_name(name): str(value)[:MAX_TAG]
            for name, value in tags.items()
            if value is not None
        }
        new = {name: text for name, text in texts.items() if self.tags.get(name) != text}
        if new:
            self.client.log_batch(self.id, tags=[RunTag(*tag) for tag in new.items()])
            self.tags |= new

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Send the params with new names: MLflow never changes a param."""
        from mlflow.entities import Param

        named = {mlflow_safe_name(name): format_param(value) for name, value in params.items()}
        new = {name: text for name, text in named.items() if name not in self.params}
        for part in split_list(list(new.items()), 100):
            self.client.log_batch(self.id, params=[Param(*param) for param in part])
        self.params |= set(new)

    def add_points(self, points: list[Point]) -> None:
        """Send the points whose name and step the run does not have."""
        stored = {
            (name, point.step)
            for name in {name for name, *_ in points} & self.metrics.keys()
            for point in self.client.get_metric_history(self.id, name)
        }
        self._send([point for point in points if (point[0], point[3]) not in stored])

    def set_numbers(self, numbers: Mapping[str, float], milliseconds: int) -> None:
        """Send single numbers, at step 0; a new value replaces the old one."""
        new = [(name, value) for name, value in numbers.items() if self.metrics.get(name) != value]
        self._send([(name, value, milliseconds, 0) for name, value in new])

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        for part in split_list(points, 1000):
            self.client.log_batch(self.id, metrics=[Metric(*point) for point in part])
        self.metrics |= {name: value for name, value, *_ in points}

    def add_dataset(self, card: Mapping[str, Any]) -> None:
        """Send the data set of a card, which MLflow stores once per name and digest of files."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        files = json.dumps(card.get("files", {}), sort_keys=True)
        name = str(card.get("name", "data"))[:500]
        digest = hashlib.sha256(files.encode()).hexdigest()[:8]
        source, counts = (json.dumps({key: card.get(key)}) for key in ("source", "counts"))
        data = Dataset(name, digest, "card", source, profile=counts)
        used = DatasetInput(data, [InputTag("mlflow.data.context", "training")])
        self.client.log_inputs(self.id, [used])

    def add_model(self, model_id: str) -> None:
        from mlflow.entities import LoggedModelOutput

        if model_id not in self.models:
            self.client.log_outputs(self.id, [LoggedModelOutput(model_id, step=0)])
            self.models.add(model_id)

    def set_state(self, status: str, when: float) -> None:
        """Set the status if it differs, with the time of the end, in seconds since 1970."""
        if status != "RUNNING" and (status != self.status or abs(self.ended - when) > 0.002):
            self.client.set_terminated(self.id, status, int(when * 1000))
            self.ended = when
        elif status != self.status:
            self.client.update_run(self.id, status=status)
        self.status = status


def list_runs(client: Any, experiment_id: str) -> list[StoredRun]:
    """Return the runs of an experiment that an import created."""
    runs = client.search_runs([experiment_id], max_results=50_000)  # MLflow's limit
    return [StoredRun(client, run) for run in runs if LEVEL in run.data.tags]


def format_param(value: Any) -> str:
    """Return the value of a param as a text of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 1] + "…"


def split_list(items: list[Any], size: int) -> list[list[Any]]:
    """Return ``items`` in parts: MLflow limits the size of a call."""
    return [items[start : start + size] for start in range(0, len(items), size)]

"""A run of MLflow's store and what it has: only what it lacks is sent."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from moecore.tracking.stored_run import Point, mlflow_safe_name

UID = "moecore.uid"
PARENT = "mlflow.parentRunId"
LEVEL = "level"  # "method": a parent; "shared": that of what all methods use; "stage": a child
LONGEST_TAG = 5000
LONGEST_PARAM = 500


class StoredRun:
    """A run as it was when it was last asked or changed; all that is sent may be sent again."""

    def __init__(self, client: Any, run: Any) -> None:
        self.client = client
        self.id: str = run.info.run_id
        self.status: str = run.info.status
        self.started: float = run.info.start_time / 1000  # seconds since 1970
        self.ended: float = (run.info.end_time or 0) / 1000
        self.tags: dict[str, str] = dict(run.data.tags)
        self.params = set(run.data.params)
        self.metrics: dict[str, float] = dict(run.data.metrics)  # the latest values
        self.models = {one.model_id for one in run.outputs.model_outputs} if run.outputs else set()

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set the tags that differ; those that are None are left as they are."""
        from mlflow.entities import RunTag

        known = {name: value for name, value in tags.items() if value is not None}
        texts = {mlflow_safe_name(name): str(value)[:LONGEST_TAG] for name, value in known.items()}
        new = {name: text for name, text in texts.items() if self.tags.get(name) != text}
        if new:
            self.client.log_batch(self.id, tags=[RunTag(*tag) for tag in new.items()])
            self.tags |= new

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Send those whose names are new: MLflow never changes a param."""
        from mlflow.entities import Param

        named = {mlflow_safe_name(name): format_param(value) for name, value in params.items()}
        new = {name: text for name, text in named.items() if name not in self.params}
        for part in split_list(list(new.items()), 100):
            self.client.log_batch(self.id, params=[Param(*param) for param in part])
        self.params |= set(new)

    def add_points(self, points: list[Point]) -> None:
        """Send the points that the run lacks, by name and step."""
        known = {
            (name, point.step)
            for name in {name for name, *_ in points} & self.metrics.keys()
            for point in self.client.get_metric_history(self.id, name)
        }
        self._send([point for point in points if (point[0], point[3]) not in known])

    def set_numbers(self, numbers: Mapping[str, float], milliseconds: int) -> None:
        """Send numbers of one value each, at step 0; a newer value replaces that of before."""
        new = [(name, value) for name, value in numbers.items() if self.metrics.get(name) != value]
        self._send([(name, value, milliseconds, 0) for name, value in new])

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        for part in split_list(points, 1000):
            self.client.log_batch(self.id, metrics=[Metric(*point) for point in part])
        self.metrics |= {name: value for name, value, *_ in points}

    def add_dataset(self, card: Mapping[str, Any]) -> None:
        """Send the data set of a data card, which MLflow keeps once: name and digest of files."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        files = json.dumps(card.get("files", {}), sort_keys=True)
        name = str(card.get("name", "data"))[:500]
        digest = hashlib.sha256(files.encode()).hexdigest()[:8]
        source, counts = (json.dumps({key: card.get(key)}) for key in ("source", "counts"))
        data = Dataset(name, digest, "card", source, profile=counts)
        used = DatasetInput(data, [InputTag("mlflow.data.context", "training")])
        self.client.log_inputs(self.id, [used])

    def add_model(self, model_id: str) -> None:
        """Link a logged model to the run, as one that it trained."""
        from mlflow.entities import LoggedModelOutput

        if model_id not in self.models:
            self.client.log_outputs(self.id, [LoggedModelOutput(model_id, step=0)])
            self.models.add(model_id)

    def set_state(self, status: str, when: float) -> None:
        """Set the status where it differs; ``when`` (seconds since 1970) it ended."""
        if status != "RUNNING" and (status != self.status or abs(self.ended - when) > 0.002):
            self.client.set_terminated(self.id, status, int(when * 1000))
            self.ended = when
        elif status != self.status:
            self.client.update_run(self.id, status=status)
        self.status = status


def list_runs(client: Any, experiment_id: str) -> list[StoredRun]:
    """Return the runs of an experiment that an import made."""
    every = client.search_runs([experiment_id], max_results=50_000)  # the most that MLflow gives
    return [StoredRun(client, run) for run in every if LEVEL in run.data.tags]


def format_param(value: Any) -> str:
    """Return the value of a param as MLflow shows it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - 1] + "…"


def split_list(items: list[Any], size: int) -> list[list[Any]]:
    """Return ``items`` in pieces: MLflow limits what one call may bring."""
    return [items[start : start + size] for start in range(0, len(items), size)]

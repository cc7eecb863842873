"""Collects points, params and tags of one MLflow run and sends them together, none of them twice.

Every call of the store is a transaction, and a finished study brings some hundred runs.
"""

from collections.abc import Mapping
from typing import Any

from moecore.tracking.known import Known, parts, shown
from moecore.tracking.names import Point, clean


class Sender:
    """What one run has got; of a run that this process did not make, the store is asked once."""

    def __init__(self, client: Any, run: Known, new: bool = False) -> None:
        self.client = client
        self.run = run
        self._params: set[str] = set()
        self._sent: set[tuple[str, int]] = set()  # name and step of points
        self._latest: dict[str, float] = {}
        self._waiting: tuple[list[Point], dict[str, str], dict[str, Any]] = ([], {}, {})
        self.has_data = False
        if not new:
            self._ask()

    def _ask(self) -> None:
        stored = self.client.get_run(self.run.id)
        self._params = set(stored.data.params)
        self._latest = dict(stored.data.metrics)
        self._sent = {
            (name, point.step)
            for name in stored.data.metrics
            for point in self.client.get_metric_history(self.run.id, name)
        }
        self.has_data = bool(stored.inputs and stored.inputs.dataset_inputs)

    def points(self, found: list[Point]) -> None:
        """Those that it does not have, by name and step."""
        self._waiting[0].extend(point for point in found if (point[0], point[3]) not in self._sent)

    def numbers(self, found: Mapping[str, float], milliseconds: int) -> None:
        """Metrics of one value each, at step 0; another value replaces the one of before."""
        self._waiting[0].extend(
            (name, value, milliseconds, 0)
            for name, value in found.items()
            if self._latest.get(name) != value
        )

    def params(self, found: Mapping[str, Any]) -> None:
        """Those whose names are new: MLflow never changes a param."""
        named = {clean(name): shown(value) for name, value in found.items()}
        new = {name: value for name, value in named.items() if name not in self._params}
        self._waiting[1].update(new)

    def tags(self, found: Mapping[str, Any]) -> None:
        """Those that differ and are not None."""
        self._waiting[2].update(found)

    def flush(self) -> None:
        """Send all that waits."""
        from mlflow.entities import Metric, Param

        points, params, tags = self._waiting
        for part in parts(points, 1000):
            self.client.log_batch(self.run.id, metrics=[Metric(*point) for point in part])
            self._sent |= {(name, step) for name, _, _, step in part}
            self._latest |= {name: value for name, value, _, _ in part}
        for pairs in parts(sorted(params.items()), 100):
            self.client.log_batch(self.run.id, params=[Param(*pair) for pair in pairs])
            self._params |= {name for name, _ in pairs}
        self.run.tag(self.client, tags)
        self._waiting = ([], {}, {})

"""One history into one MLflow run, as often as wished: nothing is sent twice."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.core.inside import inside
from moecore.run.history_file import item
from moecore.tracking.figures import Drawings
from moecore.tracking.known import Known, alive, header_tags, parts, run_name, shown
from moecore.tracking.model import log_model, logged_before, register, registered_name
from moecore.tracking.names import Point, clean, curves, numbers
from moecore.tracking.store import experiment_name


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


class Mirror:
    """The MLflow run of one history; ``run`` is None where the store has none of it yet.

    study: the folder that the paths in the history are relative to; tags: of a run that is made.
    """

    def __init__(
        self,
        client: Any,
        experiment: str,
        study: Path,
        header: dict,
        run: Known | None,
        tags: dict[str, str],
        drawings: Drawings,
    ) -> None:
        self.client = client
        self.experiment = experiment
        self.study = study
        self.drawings = drawings
        self.item = item(header["stage"], header["phase"], header["method"], header["seed"])
        self._lines: list[dict] = []
        self._done = 0  # of these lines
        self.new = run is None
        if run is None:
            begun = int(header["t"] * 1000)
            words = header_tags(header) | tags
            created = client.create_run(experiment, begun, tags=words, run_name=run_name(header))
            run = Known.of(created)
        self.run = run
        self.sender = Sender(client, run, self.new)

    def update(self, lines: list[dict], folder: Path) -> None:
        """Send what is new in ``lines``, the history of ``folder``, and set the state that it says.

        A history that has not ended is KILLED where its process is gone.
        """
        if lines is not self._lines:
            self._lines = lines
            self._done = 0
        new = lines[self._done :]
        if self._done == 0:
            self.sender.params(lines[0]["params"])
        self.sender.points(curves(new))
        for line in new:
            if "summary" in line:
                self._send_result(lines[0]["stage"], line)
        self._send_the_rest(new, folder)
        if "status" in lines[-1]:
            self._send_end(lines)
        self.sender.flush()
        self.run.set_status(self.client, *state(lines))
        self._done = len(lines)  # at last: where the store failed, all of it is tried again

    def _send_result(self, stage: str, line: dict) -> None:
        found = numbers(stage, line["summary"])
        at = int(line["t"] * 1000)
        self.sender.points([(name, value, at, 0) for name, value in found.metrics.items()])
        self.sender.params(found.params)

    def _send_the_rest(self, new: list[dict], folder: Path) -> None:
        """Tags, the data set and files."""
        for line in new:
            tags = line.get("tags", {})
            self.sender.tags({clean(name): value for name, value in tags.items()})
            if "dataset" in line and not self.sender.has_data:
                self._send_data(line["dataset"])
            if "file" in line:
                self._send_file(line["file"], folder)

    def _send_file(self, name: str, folder: Path) -> None:
        # A stage that ends moves its history: from the working folder to the published one.
        for place in (folder, self.study / "artifacts/history" / self.item):
            if inside(place, name).is_file():
                self.client.log_artifact(self.run.id, str(place / name), name.split("/")[0])
                return

    def _send_data(self, card: dict) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        hashes = sorted(map(str, card.get("files", {}).values()))
        name = str(card.get("name", "data"))
        data = Dataset(
            name=name[:500],
            digest=(hashes[0] if hashes else name)[:32],
            source_type="card",
            source=json.dumps({"source": card.get("source")}),
            profile=json.dumps({"counts": card.get("counts")}),
        )
        used = DatasetInput(data, [InputTag("mlflow.data.context", "training")])
        self.client.log_inputs(self.run.id, [used])
        self.sender.has_data = True

    def _send_end(self, lines: list[dict]) -> None:
        end = lines[-1]
        if end["status"] == "FINISHED":
            self._send_model(lines)
            self._send_figures(lines[0])
        self.sender.tags({"seconds": end["seconds"], "error": end.get("error")})

    def _send_model(self, lines: list[dict]) -> None:
        folders = [line["model"] for line in lines if "model" in line]
        if not folders or "moecore.model" in self.run.tags:
            return
        folder = inside(self.study, folders[-1])
        said = str(folder)
        try:
            logged = None
            if not self.new:
                logged = logged_before(self.client, self.experiment, self.run.id)
            if logged is None:
                logged = log_model(self.run.id, self.experiment, folder)
            name = registered_name(experiment_name(self.study), lines[0])
            self.sender.tags(register(self.client, name, logged, self.run))
        except UserError as error:  # DVC restored the history only, or the model is an older one
            said = f"left out: {error}"
        self.sender.tags({"moecore.model": said})

    def _send_figures(self, header: dict) -> None:
        if "moecore.figures" in self.run.tags:
            return
        drawn = self.drawings.of(self.study, header)
        if any(drawn.folder.iterdir()):
            self.client.log_artifacts(self.run.id, str(drawn.folder), "figures")
        shutil.rmtree(drawn.folder)
        if drawn.said:
            self.sender.tags({"moecore.figures": ", ".join(drawn.said)})


def state(lines: list[dict]) -> tuple[str, float]:
    """A history's status, and when it was so; KILLED where it has not ended but its process has."""
    end = lines[-1]
    if "status" in end:
        return end["status"], end["t"]
    return "RUNNING" if alive(lines) else "KILLED", end["t"]

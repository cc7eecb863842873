"""One history into one MLflow run, as often as wished: nothing is sent twice."""

import json
import traceback
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.run.header import item
from moecore.run.history_file import points
from moecore.tracking.figures import figures
from moecore.tracking.known import COMPLETE, Known, clean, header_tags, parts, run_name, shown
from moecore.tracking.model import log_model
from moecore.tracking.process import alive

DRAWN = {"dpi": 150, "bbox_inches": "tight"}
Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class Mirror:
    """The MLflow run of one history; ``run`` is None where the store has none of it yet.

    study: the folder that the paths in the history are relative to.
    """

    def __init__(
        self, client: Any, experiment: str, study: Path, header: dict, run: Known | None
    ) -> None:
        self.client = client
        self.experiment = experiment
        self.study = study
        self.item = item(header["stage"], header["phase"], header["method"], header["seed"])
        self._lines: list[dict] = []
        self._done = 0  # of these lines
        self.new = run is None
        if run is None:
            begun = int(header["t"] * 1000)
            tags = header_tags(header)
            created = client.create_run(experiment, begun, tags=tags, run_name=run_name(header))
            self.run = Known.of(created)
            self._params: set[str] = set()
            self._sent: set[tuple[str, int]] = set()  # name and step of points
            self._has_data = False
        else:
            self.run = run
            self._ask()

    def _ask(self) -> None:
        """What the run has, in case that another process or an earlier one sent it."""
        stored = self.client.get_run(self.run.id)
        self._params = set(stored.data.params)
        self._sent = {
            (name, point.step)
            for name in stored.data.metrics
            for point in self.client.get_metric_history(self.run.id, name)
        }
        self._has_data = bool(stored.inputs and stored.inputs.dataset_inputs)

    def update(self, lines: list[dict], folder: Path) -> None:
        """Send what is new in ``lines``, the history of ``folder``, and set the state that it says.

        A history that has not ended is KILLED where its process is gone.
        """
        if lines is not self._lines:
            self._lines = lines
            self._done = 0
        new = lines[self._done :]
        if self._done == 0:
            self._send_params(lines[0]["params"])
        self._send_points(_curves(new))
        if any("summary" in line for line in new):
            self._send_points(_result(lines))
        self._send_the_rest(new, folder)
        if "status" in lines[-1]:
            self._complete(lines)
        else:
            self.run.set_status(
                self.client, "RUNNING" if alive(lines) else "KILLED", lines[-1]["t"]
            )
        self._done = len(lines)  # at last: where the store failed, all of it is tried again

    def _send_points(self, found: list[Point]) -> None:
        from mlflow.entities import Metric

        new = [point for point in found if (point[0], point[3]) not in self._sent]
        for part in parts(new, 1000):
            self.client.log_batch(self.run.id, metrics=[Metric(*point) for point in part])
            self._sent |= {(name, step) for name, _, _, step in part}

    def _send_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        named = {clean(name): shown(value) for name, value in params.items()}
        new = [item for item in sorted(named.items()) if item[0] not in self._params]
        for part in parts(new, 100):
            self.client.log_batch(self.run.id, params=[Param(*item) for item in part])
            self._params |= {name for name, _ in part}

    def _send_the_rest(self, new: list[dict], folder: Path) -> None:
        """Tags, the data set and files."""
        tags = {}
        for line in new:
            tags |= {clean(name): value for name, value in line.get("tags", {}).items()}
            if "dataset" in line and not self._has_data:
                self._send_data(line["dataset"])
            if "file" in line:
                self._send_file(line["file"], folder)
        self.run.tag(self.client, tags)

    def _send_file(self, name: str, folder: Path) -> None:
        # A stage that ends moves its history: from the working folder to the published one.
        for place in (folder, self.study / "artifacts/history" / self.item):
            if (place / name).is_file():
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
        self._has_data = True

    def _complete(self, lines: list[dict]) -> None:
        end = lines[-1]
        if end["status"] == "FINISHED":
            self._send_model(lines)
            self._send_figures(lines[0])
        self.run.tag(self.client, {"seconds": end["seconds"], "error": end.get("error")})
        self.run.set_status(self.client, end["status"], end["t"])
        self.run.tag(self.client, {COMPLETE: "true"})

    def _send_model(self, lines: list[dict]) -> None:
        folders = [line["model"] for line in lines if "model" in line]
        if not folders or "moecore.model" in self.run.tags:
            return
        folder = self.study / folders[-1]
        said = str(folder)
        try:
            log_model(self.run.id, self.experiment, folder)
        except UserError as error:  # DVC restored the history only, or the model is an older one
            said = f"left out: {error}"
        self.run.tag(self.client, {"moecore.model": said})

    def _send_figures(self, header: dict) -> None:
        if "moecore.figures" in self.run.tags:
            return
        said = []
        try:
            for name, figure in figures(self.study, header):
                file = f"figures/{name}.png"
                self.client.log_figure(self.run.id, figure, file, save_kwargs=DRAWN)
                said.append(name)
        except UserError as error:  # the result is not there any more, or of other code
            said.append(f"left out: {error}")
        except Exception as error:  # a fault of one drawing; the other runs are imported
            traceback.print_exc()
            said.append(f"failed: {type(error).__name__}: {error}")
        if said:
            self.run.tag(self.client, {"moecore.figures": ", ".join(said)})


# MLflow's page of charts makes a section of what stands before the last slash of a name, in the
# order of the alphabet: the curves of training come first, then a section for every stage's result.
def _curves(lines: list[dict]) -> list[Point]:
    """The logged points, named curve/<name>."""
    return [
        (f"curve/{clean(name)}", value, int(t * 1000), step)
        for step, t, values in points(lines)
        for name, value in values.items()
    ]


def _result(lines: list[dict]) -> list[Point]:
    """The numbers of the result, named result/<stage>/<name>; at step 0, MLflow draws bars."""
    stage = lines[0]["stage"]
    return [
        (f"result/{stage}/{clean(name)}", float(value), int(line["t"] * 1000), 0)
        for line in lines
        for name, value in line.get("summary", {}).items()
    ]

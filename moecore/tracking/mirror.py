"""One history into one MLflow run, as often as wished: what the run already has is asked of the store and never sent twice."""

import json
import re
from pathlib import Path
from typing import Any

from moecore.history_file import points, read_lines
from moecore.tracking.model import log_model
from moecore.tracking.process import alive

UID, COMPLETE = "moecore.uid", "moecore.complete"
Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class Mirror:
    """The MLflow run of one history folder. ``new`` tells whether it had to be created."""

    def __init__(self, client: Any, experiment: str, lines: list[dict]) -> None:
        header = lines[0]
        self.client, self.experiment = client, experiment
        found = client.search_runs([experiment], f"tags.`{UID}` = '{header['uid']}'", max_results=1)
        self.new = not found
        run = found[0] if found else client.create_run(experiment, int(header["t"] * 1000), tags=_tags(header), run_name=_name(header))
        self.id, self.status = run.info.run_id, run.info.status
        self.params, self.tags = set(run.data.params), dict(run.data.tags)
        self.sent = {(name, point.step) for name in run.data.metrics for point in client.get_metric_history(self.id, name)}
        self.files: set[str] = set()
        self.dataset = bool(run.inputs and run.inputs.dataset_inputs)

    def update(self, lines: list[dict], folder: Path) -> None:
        """Send what is new in ``lines``, the history of ``folder``, and set the state that it says (KILLED where its process is gone)."""
        self._batches([point for point in _points(lines) if (point[0], point[3]) not in self.sent])
        self._labels(lines)
        for line in lines:
            name = line.get("file")
            if name and name not in self.files and (folder / name).is_file():
                self.client.log_artifact(self.id, str(folder / name), name.split("/")[0])
                self.files.add(name)
        end = lines[-1] if "status" in lines[-1] else None
        if end:
            self._complete(lines, end)
        else:
            self._state("RUNNING" if alive(lines) else "KILLED", lines[-1]["t"])

    def tag(self, tags: dict[str, Any]) -> None:
        """Set the tags that differ."""
        from mlflow.entities import RunTag

        changed = {name: str(value) for name, value in tags.items() if value is not None and self.tags.get(name) != str(value)}
        for part in _parts(sorted(changed.items()), 100):
            self.client.log_batch(self.id, tags=[RunTag(name, value[:5000]) for name, value in part])
        self.tags |= changed

    def _batches(self, new: list[Point]) -> None:
        from mlflow.entities import Metric

        for part in _parts(new, 1000):
            self.client.log_batch(self.id, metrics=[Metric(*point) for point in part])
            self.sent |= {(point[0], point[3]) for point in part}

    def _labels(self, lines: list[dict]) -> None:
        """Params, tags and the data set."""
        from mlflow.entities import Param

        params = {clean(name): shown(value) for name, value in lines[0]["params"].items() if clean(name) not in self.params}
        for part in _parts(sorted(params.items()), 100):
            self.client.log_batch(self.id, params=[Param(name, value) for name, value in part])
        self.params |= set(params)
        self.tag(_tags(lines[0]) | {clean(name): value for line in lines for name, value in line.get("tags", {}).items()})
        for card in [line["dataset"] for line in lines if "dataset" in line and not self.dataset]:
            self._dataset(card)

    def _dataset(self, card: dict) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        digest = str(next(iter(sorted(map(str, card.get("files", {}).values()))), card.get("name", "")))[:32]
        source = json.dumps({"source": card.get("source")})
        data = Dataset(str(card.get("name", "data"))[:500], digest, "card", source, profile=json.dumps({"counts": card.get("counts")}))
        self.client.log_inputs(self.id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
        self.dataset = True

    def _complete(self, lines: list[dict], end: dict) -> None:
        card = next((line["dataset"] for line in reversed(lines) if "dataset" in line), None)
        for folder in [line["model"] for line in lines if "model" in line and end["status"] == "FINISHED"]:
            if card and "moecore.model" not in self.tags and Path(folder).is_dir():
                log_model(self.id, self.experiment, Path(folder), card)
                self.tag({"moecore.model": folder})
        self.tag({"seconds": end["seconds"], "error": end.get("error")})
        self._state(end["status"], end["t"])
        self.tag({COMPLETE: "true"})

    def _state(self, status: str, when: float) -> None:
        if status == self.status:
            return
        if status == "RUNNING":
            self.client.update_run(self.id, status=status)
        else:
            self.client.set_terminated(self.id, status, int(when * 1000))
        self.status = status


def read(*folders: Path) -> tuple[list[dict], Path]:
    """The history of the first folder that has one, and that folder: a stage moves its history when it ends."""
    for folder in folders:
        if lines := read_lines(folder):
            return lines, folder
    return [], folders[0]


def clean(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 500 else text[:499] + "…"


def _points(lines: list[dict]) -> list[Point]:
    logged = [(clean(name), value, int(t * 1000), step) for step, t, values in points(lines) for name, value in values.items()]
    last = max((point[3] for point in logged), default=0)
    final = {clean(name): (float(value), line["t"]) for line in lines for name, value in line.get("summary", {}).items()}
    for name, *_ in logged:  # a curve already ends in this value
        final.pop(name, None)
    return logged + [(name, value, int(t * 1000), last) for name, (value, t) in final.items()]


def _name(header: dict) -> str:
    seed = f"seed {header['seed']}" if header["seed"] is not None else None
    return " ".join(str(part) for part in (header["stage"], header["phase"], header["method"], seed) if part is not None)


def _tags(header: dict) -> dict[str, str]:
    tags = {
        UID: header["uid"], "stage": header["stage"], "method": header["method"], "seed": header["seed"], "phase": header["phase"],
        "dvc.stage": header["dvc_stage"], "params_hash": header["params_hash"], "mlflow.source.git.commit": header["commit"],
        "git.dirty": header["dirty"], "mlflow.source.name": header["command"], "host": header["host"], "pid": header["pid"], "python": header["python"],
    }  # fmt: skip
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in tags.items() if value is not None}


def _parts(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]

"""A repository with one study, an MLflow store for all tests, and runs to import."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.core.source_layout import ROOT
from moecore.data.card import parse_card_task
from moecore.measure.calibration import METRICS, PredictionQuality, put_quality
from moecore.parts import Config, Values
from moecore.run.run_record import record_run
from moecore.statistics.intervals import Interval
from moecore.tasks.class_task import reliability_bins
from moecore.tracking.sync import VIEW_TAG

CARD = {"name": "toy", "files": {"a": "0123"}, "counts": {"train": {"x": 1}}, "source": "here"}
CARD |= {"channels": 1, "size": 8, "mean": [0.5], "std": [0.5]}
CARD |= {"task": {"kind": "classification", "classes": ["x", "y"]}}


class Params(Config):
    epochs: int = 3
    text: str = "x" * 600


class Scores(Config):
    test: dict[str, float] = {"accuracy": 0.5}


class Study:
    """A study folder of its own, so an MLflow experiment of its own in the store of all tests."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.store = store

    def write(self, seed: int = 0, steps: int = 3, method: str = "vmoe", stage: str = "pretrain"):
        with record_run(stage, Params(), method=method, seed=seed) as run:
            for step in range(1, steps + 1):
                run.log(step, {"loss": 1 / step, "share@1": 0.5})
            run.log_tag("runtime.device", "cpu")
            run.log_dataset(CARD)
            run.write_table("rows", [{"a": 1}])
            run.write_result(Scores())

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.store)

    def every_run(self) -> list[Any]:
        experiment = self.client.get_experiment_by_name(self.folder.name)
        return list(self.client.search_runs([experiment.experiment_id])) if experiment else []

    def runs(self) -> list[Any]:
        return [run for run in self.every_run() if run.data.tags["level"] == "stage"]

    def parents(self) -> list[Any]:
        """Those that carry the numbers of a method and seed, and the shared one."""
        return [run for run in self.every_run() if run.data.tags["level"] != "stage"]

    def parent(self, family: str = "vmoe/0") -> Any:
        """The current one of a method and seed."""
        named = [one for one in self.parents() if one.data.tags["moecore.family"] == family]
        [parent] = [one for one in named if one.data.tags.get("dvc.current") == "true"]
        return parent

    def view(self) -> dict[str, Any]:
        experiment = self.client.get_experiment_by_name(self.folder.name)
        return json.loads(json.loads(experiment.tags[VIEW_TAG])["state"])

    def parent_ids(self) -> dict[str, str]:
        """Stage → the id of its parent, of the current runs."""
        tags = [run.data.tags for run in self.runs() if run.data.tags["dvc.current"] == "true"]
        return {one["stage"]: one["mlflow.parentRunId"] for one in tags}

    def curve(self, run: Any, name: str) -> list[tuple[int, float]]:
        points = self.client.get_metric_history(run.info.run_id, name)
        return [(point.step, point.value) for point in points]

    def start(self, *words: str, **env: str) -> subprocess.Popen:
        """``python words…`` in the study's folder, on the store of all tests."""
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
        given = {"cwd": self.folder, "env": environment, "preexec_fn": hears_interrupts}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([sys.executable, *words], text=True, **given, **pipes)

    def moecore(self, *words: str) -> subprocess.Popen:
        return self.start("-c", "from moecore.pipeline.cli import app; app()", *words)


def only_run(study: Study, seed: int = 0) -> Any:
    [run] = [run for run in study.runs() if run.data.tags.get("seed", "0") == str(seed)]
    return run


def calibrate(ece: float = 0.5) -> None:
    """Write a measurement of the pretrained model, and the data card that its report reads."""
    some = Interval(0.5, 0.4, 0.6)
    bins = reliability_bins(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    before = PredictionQuality(score=some, nll=some, brier=some, ece=some, bins=bins)
    out = Values(METRICS, parse_card_task(CARD["task"]), lambda name, compute: compute())
    put_quality(before, "before", out)
    put_quality(before._replace(ece=Interval(ece, 0.4, 0.6)), "after", out)
    out.put("temperature", 2.0)
    out.facts |= {"at_limit": False, "scores": "", "top5": None, "test_images": 4}
    result = out.found()
    Path("artifacts/data/pretrain").mkdir(parents=True, exist_ok=True)
    Path("artifacts/data/pretrain/card.json").write_text(json.dumps(CARD))
    with record_run("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.write_result(result)


def hears_interrupts() -> None:
    """Ctrl-C reaches the process, also where a shell ran the tests as a job that ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> str:
    """The address of an empty database, made once: creating one takes seconds."""
    from moecore.tracking.mlflow_connection import connect_store

    folder = tmp_path_factory.mktemp("store")
    address = f"sqlite:///{folder / 'mlflow.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        connect_store()
    return address


@pytest.fixture
def study(tmp_path, monkeypatch, request, store) -> Study:
    folder = tmp_path / ".runs" / request.node.name.replace("[", "_").rstrip("]")
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return Study(folder, store)

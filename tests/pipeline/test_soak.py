"""SIGKILL of stages, DVC, ``moecore run`` and imports into MLflow, at random: results stay."""

# Only ``make soak`` does it, at least a hundred times, and says its seed: SEED=… repeats it.

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moecore.core.files import SHA256_KEY
from moecore.core.safetensors_files import read_tensors
from moecore.run.history_file import logged_points, read_dvc_locks, read_lines
from moecore.tracking.mlflow_run import UID_TAG
from tests import forked
from tests.project import COMMAND, Project

KILLS = int(os.environ.get("MOECORE_SOAK", "0"))  # of stages
pytestmark = pytest.mark.skipif(not KILLS, reason="for `make soak`")
SEED = int(os.environ.get("MOECORE_SOAK_SEED", "0"))

# Of every Python process that starts with this folder in its path; forked stages inherit it. The
# process kills itself right before its n-th operation that changes a file of the project.
HOOK = """
import os, signal, sys
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
done = 0
def hook(event, arguments):
    global done
    if event != "open" and event not in CHANGES:
        return
    last = os.environ.get("SOAK_OPERATION")
    if last is None:
        return
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if not os.path.abspath(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "/"
    ).startswith(os.environ["SOAK_FOLDER"]):
        return
    done += 1
    if done >= int(last):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""
PLAN = [sys.executable, "-c", COMMAND, "plan"]
# What depends on how quickly a machine is, by the names of keys
TIMED = ("second", "_ms", "memory", "slower", "ratio", "measured_at", "t")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The folder with the hook, and a server of stages that has it."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "sitecustomize.py").write_text(HOOK)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    os.environ.pop(forked.SHARED, None)
    forked.server.cache_clear()
    yield folder
    forked.server.cache_clear()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def project(finished, server, tmp_path_factory) -> Project:
    return finished.copy(tmp_path_factory.mktemp("soak") / "project")


@pytest.fixture(scope="module")
def undisturbed(finished) -> dict[str, Any]:
    return content(finished.folder)


def content(folder: Path) -> dict[str, Any]:
    """Every file below artifacts/, by what in it must not depend on a kill."""
    files = [path for path in (folder / "artifacts").rglob("*") if path.is_file()]
    whole = [path for path in files if not any(part[0] == "." for part in path.parts[1:])]
    return {path.relative_to(folder).as_posix(): _content(path) for path in whole}


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        read_tensors(path)  # verifies its checksum
    if path.name == "history.jsonl":
        lines = map(json.loads, path.read_text().splitlines())
        return [(line["step"], untimed(line["values"])) for line in lines if "values" in line]
    if path.suffix == ".json" and "measured" in path.parts:
        if "cost" in path.parts:
            return sorted(json.loads(path.read_text()))
        return untimed(json.loads(path.read_text()))
    if path.suffix in (".html", ".png") or path.name in ("compare.json", "numbers.json"):
        return path.stat().st_size > 0
    return hashlib.sha256(path.read_bytes()).hexdigest()


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if not _timed(key)}
        return {key: untimed(inner) for key, inner in kept.items()}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def _timed(key: str) -> bool:
    return key in ("t", SHA256_KEY) or any(word in key for word in TIMED if len(word) > 1)


class Killer:
    """Kills at what one generator draws, and counts."""

    def __init__(self, draw: random.Random, hook: Path) -> None:
        self.draw = draw
        self.hook = hook
        self.killed = {"time": 0, "operation": 0}

    def environment(self, project: Project, most: int) -> tuple[dict[str, str], float]:
        """What a process is started with, and the seconds after which it is killed."""
        if self.draw.random() < 0.5:
            return {}, math.exp(self.draw.uniform(math.log(0.02), math.log(most)))
        operation = round(math.exp(self.draw.uniform(0, math.log(60))))
        return {"SOAK_OPERATION": str(operation), "SOAK_FOLDER": str(project.folder)}, math.inf

    def count(self, after: float) -> None:
        self.killed["operation" if math.isinf(after) else "time"] += 1

    def stage(self, project: Project, words: tuple[str, ...]) -> bool:
        """Start a stage and kill it; whether it was killed before its end."""
        more, after = self.environment(project, 3)
        stage = forked.Stage(project.folder, words, project.environment | more)
        until = time.monotonic() + after
        while stage.runs():
            if time.monotonic() > until:
                stage.kill()
                self.count(after)
                return True
            time.sleep(0.002)
        killed = stage.wait()[0] == -signal.SIGKILL
        if killed:
            self.count(after)
        return killed

    def command(self, project: Project, words: list[str], most: int) -> bool:
        """The same of a command, whose children have to be gone two seconds later."""
        more, after = self.environment(project, most)
        path = {"PYTHONPATH": f"{self.hook}{os.pathsep}{project.environment['PYTHONPATH']}"}
        with open(project.folder / ".soak.log", "a") as log:
            given = {"cwd": project.folder, "env": project.environment | path | more}
            started = subprocess.Popen(words, **given, stdout=log, stderr=log)
            try:
                started.wait(None if math.isinf(after) else after)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
        killed = started.returncode != 0
        if killed:
            self.count(after)
        until = time.monotonic() + 2
        while (left := processes_in(project.folder)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"of a killed {' '.join(words)} these went on: {left}"
        return killed


def processes_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # ended in between, or another user's
    return found


def stages_of(project: Project) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """The words of every stage and what it writes, in the order of the pipeline."""
    return {
        name: (
            tuple(entry["cmd"].removeprefix("python -m moecore.stages.").split()),
            [out["path"] for out in entry["outs"]],
        )
        for name, entry in read_dvc_locks(project.folder).items()
        if entry["cmd"].startswith("python -m moecore.stages.")
    }


def assert_whole(project: Project, undisturbed: dict[str, Any], of: str) -> None:
    """What is there is what an undisturbed run writes."""
    # The history of a stage that was told to end, as its driver was killed, has all until then.
    for name, found in content(project.folder).items():
        whole = undisturbed[name]
        if name.endswith("history.jsonl"):
            last = read_lines((project.folder / name).parent)[-1]
            whole = whole[: len(found) if last["status"] == "KILLED" else None]
        assert found == whole, f"after a kill of {of}: {name}"


def remove(project: Project, outs: list[str]) -> None:
    for out in outs:
        path = project.folder / out
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def test_every_stage_killed_at_random_ends_as_undisturbed(project, undisturbed, server):
    draw = random.Random(SEED)
    killer = Killer(draw, server)
    every = stages_of(project)
    chosen = list(every)
    while KILLS > len(chosen):
        chosen += every
    for name in chosen:
        words, outs = every[name]
        if draw.random() < 0.7:  # else what was there is replaced
            remove(project, outs)
        for _ in range(5):
            if killer.stage(project, words):
                break
        assert_whole(project, undisturbed, name)
        project.stage(*words)
        assert content(project.folder) == undisturbed, f"{name}, killed and started again"
        left = [path for path in project.folder.rglob(".*.part") if "artifacts" in path.parts]
        assert not left, f"{name}: {left}"
    print(f"seed {SEED}, {len(chosen)} stages: {killer.killed}")
    assert sum(killer.killed.values()) >= 0.5 * len(chosen)


def remove_empty_files(project: Project) -> None:
    """Do what a user does when DVC says that a file of its own is damaged."""
    # DVC empties dvc.lock and its list of busy files before it writes them.
    lock = project.folder / "dvc.lock"
    if lock.exists() and not lock.read_bytes():
        assert "dvc.lock: is not as DVC writes it (empty" in project.attempt(PLAN).stderr
        lock.unlink()
    busy = project.folder / ".dvc/tmp/rwlock"
    if busy.exists() and not busy.read_bytes():
        busy.unlink()


@pytest.mark.parametrize("command", ["dvc repro", "moecore run"])
def test_a_pipeline_killed_at_random_ends_as_undisturbed(
    command, finished, undisturbed, server, tmp_path
):
    project = Project(tmp_path).with_dvc()
    killer = Killer(random.Random(f"{command} {SEED}"), server)
    words = ["dvc", "repro"]
    if command == "moecore run":
        words = [sys.executable, "-c", COMMAND, "run", "--jobs", "2"]
    for _ in range(KILLS // 6):
        if not killer.command(project, words, 20):
            break
        assert_whole(project, undisturbed, command)
        remove_empty_files(project)
    project.run(words)
    assert content(project.folder) == undisturbed
    assert project.run(["dvc", "status"]).stdout.strip() == "Data and pipelines are up to date."
    print(f"seed {SEED}, {command}: {killer.killed}")


def test_an_import_killed_at_random_knows_every_run_once(finished, server, tmp_path):
    from mlflow import MlflowClient

    project = finished.copy(tmp_path / "project")
    killer = Killer(random.Random(f"sync {SEED}"), server)
    words = [sys.executable, "-c", COMMAND, "sync"]
    for _ in range(KILLS // 8):
        killer.command(project, words, 15)
    project.run(words)
    client = MlflowClient(f"sqlite:///{project.folder / 'mlflow.db'}")
    names = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = [run for name in names for run in client.search_runs([name], max_results=5000)]
    known = [run for run in runs if run.data.tags.get("level") == "stage"]
    histories = [read_lines(file.parent) for file in project.folder.rglob("history.jsonl")]
    assert sorted(run.data.tags[UID_TAG] for run in known) == sorted(h[0]["uid"] for h in histories)
    ids = {run.data.tags[UID_TAG]: run.info.run_id for run in known}
    for history in histories:
        points = [(step, values) for step, _, values in logged_points(history)]
        expected = [(step, values["loss"]) for step, values in points if "loss" in values]
        found = client.get_metric_history(ids[history[0]["uid"]], "loss/total")
        assert [(point.step, point.value) for point in found] == expected
    print(f"seed {SEED}, sync: {killer.killed}")

"""All histories into MLflow, idempotently: what it has is left alone, what it lacks is added, what is stale is ended."""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moecore.history_file import NAME, read_lines
from moecore.plan import locked
from moecore.tracking.mirror import COMPLETE, UID, Mirror
from moecore.tracking.process import runs
from moecore.tracking.store import connect, experiment, experiment_name, home


class Counts(NamedTuple):
    """What a sync did."""

    added: int = 0
    updated: int = 0
    current: int = 0
    ended: int = 0


def sync() -> Counts:
    """Import the histories of the main pipeline and of every study; returns the sums."""
    client = connect()
    folders = [folder for folder in (home(), *sorted((home() / "pipelines").glob("*"))) if any(_histories(folder))]
    each = [_sync(client, folder) for folder in folders]
    return Counts(*(sum(column) for column in zip(*each, strict=True))) if each else Counts()


def _sync(client: Any, folder: Path) -> Counts:
    number = experiment(client, experiment_name(folder))
    known = {run.data.tags.get(UID): run for run in _runs(client, number)}
    locked, added, updated = _locked(folder), 0, 0
    current: set[str] = set()
    present: set[str] = set()
    for history in _histories(folder):
        lines = read_lines(history)
        if not lines or lines[0]["uid"] in present:
            continue
        uid = lines[0]["uid"]
        present.add(uid)
        entry = None if locked is None else locked.get(history.relative_to(folder).as_posix())
        is_current = (locked is None or entry is not None) and "status" in lines[-1]
        current |= {uid} if is_current else set()
        tags = {"dvc.current": str(is_current).lower(), **(entry or {})}
        run = known.get(uid)
        if run is not None and run.data.tags.get(COMPLETE) == "true" and "status" in lines[-1]:
            _retag(client, run, tags)
            continue
        mirror = Mirror(client, number, lines)
        mirror.update(_absolute(lines, folder), history)
        mirror.tag(tags)
        added, updated = added + mirror.new, updated + (not mirror.new)
    gone = [run for uid, run in known.items() if uid not in present]
    for run in gone:
        _retag(client, run, {"dvc.current": "false"} if run.data.tags.get("dvc.current") == "true" else {})
    return Counts(added, updated, len(current), sum(_ended(client, run) for run in gone))


def _histories(folder: Path) -> Iterator[Path]:
    """Published histories first, then those of runs that are under way or were killed."""
    for place in (folder / "artifacts" / "history", folder / ".state"):
        yield from (file.parent for file in sorted(place.rglob(NAME)) if not any(part.endswith((".part", ".removed")) for part in file.parts))


def _runs(client: Any, number: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([number], max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _locked(folder: Path) -> dict[str, dict[str, str]] | None:
    """History folder → DVC tags, for the stages that dvc.yaml still has; None where DVC was not used."""
    if not (folder / "dvc.lock").is_file():
        return None
    stages = locked(folder)
    listed = subprocess.run([sys.executable, "-m", "dvc", "stage", "list", "--name-only"], cwd=folder, capture_output=True, text=True)
    alive = set(listed.stdout.split()) if listed.returncode == 0 else set(stages)
    return {
        out["path"]: {"dvc.stage": name, "dvc.inputs": _key(entry)}
        for name, entry in stages.items() if name in alive
        for out in entry.get("outs", []) if out["path"].startswith("artifacts/history/")
    }  # fmt: skip


def _key(entry: dict) -> str:
    text = json.dumps([entry["cmd"], entry.get("deps"), entry.get("params")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _absolute(lines: list[dict], folder: Path) -> list[dict]:
    """Model folders are relative to the folder of the study."""
    return [line | {"model": str(folder / line["model"])} if "model" in line else line for line in lines]


def _retag(client: Any, run: Any, tags: dict[str, str]) -> None:
    for name, value in tags.items():
        if run.data.tags.get(name) != value:
            client.set_tag(run.info.run_id, name, value)


def _ended(client: Any, run: Any) -> bool:
    """End a run whose history is gone and whose process is, too."""
    tags = run.data.tags
    if run.info.status != "RUNNING" or tags.get("host") != platform.node() or runs(int(tags.get("pid", 0)), run.info.start_time / 1000):
        return False
    client.set_terminated(run.info.run_id, "KILLED")
    return True

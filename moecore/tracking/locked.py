"""Which histories are the current ones, by DVC's lock file: the others are of stages that went."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import yaml

from moecore.run.history_file import locked

Stamp = tuple[int, int] | None  # size and time of change of a file; None where there is none


class Locked:
    """The lock file of one study; read again when it, or what defines the stages, has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of_lock: Stamp = None
        self._of_stages: tuple[Stamp, ...] = ()
        self._stages: dict[str, dict] = {}
        self._alive: set[str] | None = None

    def histories(self) -> dict[str, dict[str, str]] | None:
        """History folder → tags that DVC gives it; None where DVC was not used.

        A stage that dvc.yaml no longer has stays in the lock file: it is left out here.
        """
        lock = stamp(self.folder / "dvc.lock")
        if lock is None:
            return None
        stages = tuple(stamp(self.folder / name) for name in ("dvc.yaml", "params.yaml"))
        if stages != self._of_stages:  # asking DVC takes it seconds
            self._alive = _stage_names(self.folder)
            self._of_stages = stages
        if lock != self._of_lock:
            self._read(lock)
        return {
            out["path"]: {"dvc.stage": name, "dvc.inputs": _key(entry)}
            for name, entry in self._stages.items()
            if self._alive is None or name in self._alive
            for out in entry.get("outs", [])
            if out["path"].startswith("artifacts/history/")
        }

    def _read(self, lock: Stamp) -> None:
        try:
            self._stages = locked(self.folder)
            self._of_lock = lock
        except yaml.YAMLError:
            pass  # DVC is writing it: what was read before holds until the next time


def stamp(file: Path) -> Stamp:
    """What changes when a file does."""
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_size, stat.st_mtime_ns


def _stage_names(folder: Path) -> set[str] | None:
    """The stages of dvc.yaml; None where DVC cannot read it."""
    command = [sys.executable, "-m", "dvc", "stage", "list", "--name-only"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if listed.returncode != 0:
        return None
    return set(listed.stdout.split())


def _key(entry: dict) -> str:
    """One word for all that a stage depended on when it ran."""
    text = json.dumps([entry["cmd"], entry.get("deps"), entry.get("params")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

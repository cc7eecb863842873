"""The histories of a study on disk, who still writes them, and which of them are up to date."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages
from moecore.core.source_layout import list_project_dvc_files
from moecore.run.history_file import HISTORY_FILE, GrowingHistory, execution_subpath, read_dvc_locks
from moecore.study.document import load_yaml_document

PLACES = ("artifacts/history", ".state")  # published histories, and those of runs under way


class ExecutionHistory(NamedTuple):
    """One execution of a stage: its folder, and the lines that are there so far."""

    folder: Path
    lines: list[dict]

    @property
    def header(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def item(self) -> str:
        """Its path in artifacts/history, and that of its result in artifacts/measured."""
        return execution_subpath(
            *(self.header[name] for name in ("stage", "phase", "method", "seed"))
        )

    @property
    def has_ended(self) -> bool:
        return "status" in self.lines[-1]

    def run_state(self) -> tuple[str, float]:
        """Return MLflow's status, and since when; KILLED where the process went without a word."""
        end = self.lines[-1]
        if self.has_ended:
            return end["status"], end["t"]
        writer = next(line for line in reversed(self.lines) if "pid" in line)
        return "RUNNING" if is_process_running(
            writer["host"], writer["pid"], writer["t"]
        ) else "KILLED", end["t"]


def is_process_running(host: str, pid: int, at: float) -> bool:
    """Whether a process runs that was there ``at`` seconds since 1970; True on another host.

    Numbers of ended processes are used again: one that began later is another.
    """
    if host != platform.node():
        return True
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= at + 1
    except psutil.NoSuchProcess:
        return False


def history_folders(study: Path) -> list[Path]:
    """Return the folders of a study that hold a history, published ones first."""
    folders = []
    for place in PLACES:
        for folder, inner, files in os.walk(study / place):
            # what is being written, or being removed, is not there
            inner[:] = sorted(n for n in inner if not n.endswith((".part", ".removed")))
            if HISTORY_FILE in files:
                inner.clear()
                folders.append(Path(folder))
    return folders


def read_histories(study: Path, readers: dict[Path, GrowingHistory]) -> dict[str, ExecutionHistory]:
    """Return by uid the history that says most: a resumed run's published one may be older.

    readers: what was read before, folder by folder; it is filled.
    """
    newest: dict[str, ExecutionHistory] = {}
    for folder in history_folders(study):
        lines = readers.setdefault(folder, GrowingHistory(folder)).read()
        if lines and "uid" in lines[0]:
            known = newest.setdefault(lines[0]["uid"], ExecutionHistory(folder, lines))
            if lines[-1]["t"] > known.lines[-1]["t"]:
                newest[lines[0]["uid"]] = ExecutionHistory(folder, lines)
    return newest


def paths_in_dvc_locks(study: Path) -> frozenset[str] | None:
    """Return the folders in DVC's lock files; None where DVC was not used."""
    locks = list_project_dvc_files(study, "dvc.lock")
    newest = max((lock.stat().st_mtime_ns for lock in locks), default=None)
    if newest is None:
        return None
    return _read_lock(study, newest)


@cache
def _read_lock(study: Path, written: int) -> frozenset[str]:
    outs = [out for stage in read_dvc_locks(study).values() for out in stage.get("outs", ())]
    return frozenset(out["path"] for out in outs)


def study_methods(study: Path) -> list[str]:
    """Return the methods that params.yaml runs; none where it cannot be read."""
    try:
        return list(load_yaml_document(study / "params.yaml").data["run"]["methods"])
    except (UserError, KeyError, TypeError):
        return []  # `moecore check` says what is wrong with the file


def allow_study_packages(study: Path) -> None:
    """Let this process import parts of the packages that a study lists; of none that cannot be
    read. Its models have such parts, and its measurements such pages.
    """
    try:
        document = load_yaml_document(study / "params.yaml")
    except UserError:
        allow_packages((), ())
    else:
        allow_packages(document.packages, document.folders)

"""Where MLflow keeps its runs: $MLFLOW_TRACKING_URI, else a sqlite file in the repository."""

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from moecore.core.files import UserError
from moecore.core.roots import repository
from moecore.run.history_file import locked
from moecore.tracking import answers, database

PATIENCE = 300.0  # seconds, for another process that imports
QUIET = 10.0  # seconds, until that is said
WRITTEN = 0.5  # seconds in which DVC has written a lock file that was not whole
SILENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the page for training, not for chats


def home() -> Path:
    """The repository: of DVC inside a stage, else git's root, else the current folder."""
    if root := repository():
        return root
    found = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if found.returncode == 0:
        return Path(found.stdout.strip()).resolve()
    return Path().resolve()


def uri() -> str:
    """The address of the store; absolute, as an experiment of DVC runs in another folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def is_server() -> bool:
    """True where the store is a server that somebody else has started."""
    return answers.is_server(uri())


def settle() -> None:
    """Let MLflow give up within seconds, and say nothing beside what it raises."""
    for name, value in (answers.IMPATIENT | SILENT).items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It prints a traceback before it raises, which is told in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def connect() -> Any:
    """An MlflowClient on the store, which is created where it is a file that does not exist.

    Raises UserError where the store does not answer within seconds.
    """
    settle()
    address = uri()
    file = database.file_of(address)
    if file is not None:
        database.check(file)
    with alone("mlflow.lock"), answers.answering(address):
        if file is not None and not file.exists():
            database.create(file, lambda part: _client(f"{database.SQLITE}{part}"))
        client = _client(address)
    if file is not None:
        database.opened(file)
    return client


def _client(address: str) -> Any:
    """A client that was answered; a new database has its tables then."""
    # Here, as importing it takes a second and reads the environment that is set above.
    from mlflow import MlflowClient

    client: Any = MlflowClient(address)
    if answers.is_server(address):
        client = answers.Limited(client, answers.limit())
    client.search_experiments(max_results=1)
    return client


def experiment(client: Any, name: str) -> str:
    """The id of an experiment, which is created where it does not exist.

    Beside a sqlite store its files go to mlruns/.
    """
    with alone("mlflow.lock"):
        found = client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        files = None
        if uri().startswith("sqlite:///"):
            files = (home() / "mlruns" / name).as_uri()
        return client.create_experiment(name, artifact_location=files, tags=KIND)


def experiment_name(folder: Path) -> str:
    """One experiment per study: its folder's name, and ``moecore`` for the main pipeline."""
    folder = folder.resolve()
    return folder.name if folder.parent.name == "pipelines" else "moecore"


@contextmanager
def alone(name: str) -> Iterator[TextIO]:
    """The open file .state/``name``, for one process at a time.

    A fresh sqlite database that two processes open together is broken; two that import the same
    history together make two runs of it. Raises UserError where it takes another one too long.
    """
    lock = home() / ".state" / name
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "a+")
    except OSError as error:
        raise UserError(f"{lock}: cannot be written, {error.strerror}; mend that") from error
    with handle:
        _take(handle, lock)
        yield handle


def _take(handle: TextIO, lock: Path) -> None:
    begun = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
        if waited > PATIENCE:
            raise UserError(
                f"{lock}: held for {PATIENCE:.0f} s by another `moecore sync` or `moecore ui` "
                f"(`fuser {lock}` says which); wait for it or end it, then run `moecore sync`"
            )
        if waited > QUIET and not said:
            print(f"{lock}: waits for another import to end", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.05)


Stamp = tuple[int, int] | None  # size and time of change of a file; None where there is none


class Locked:
    """The lock file of one study; read again when it, or what defines the stages, has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of_lock: Stamp = None
        self._damaged: Stamp = None
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
        except UserError as error:  # what was read before holds until the next time
            time.sleep(WRITTEN)
            if lock != self._damaged and stamp(self.folder / "dvc.lock") == lock:
                self._damaged = lock  # said once
                print(f"{error}. Until then no run counts as current", file=sys.stderr, flush=True)


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

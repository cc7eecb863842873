"""Where MLflow keeps its runs: $MLFLOW_TRACKING_URI, else a sqlite file in the repository that several processes may create at once."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.files import StageError

IMPATIENT = {  # a dead server costs seconds, not minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
SILENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def home() -> Path:
    """The repository: $DVC_ROOT inside a stage, else git's root, else the current folder."""
    if root := os.environ.get("DVC_ROOT"):
        return Path(root).resolve()
    found = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    return Path(found.stdout.strip() if found.returncode == 0 else ".").resolve()


def uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def connect() -> Any:
    """An MlflowClient on the store, which is created first where it is a file that does not exist.

    Raises StageError where the store does not answer within seconds.
    """
    for name, value in (IMPATIENT | SILENT).items():
        os.environ.setdefault(name, value)
    import logging

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    with _alone():
        client = MlflowClient(uri())
        try:
            client.search_experiments(max_results=1)  # creates the tables of a new database
        except Exception as error:
            raise StageError(f"{uri()}: MLflow does not answer ({_first_line(error)}); the histories on disk are complete") from error
        return client


def experiment(client: Any, name: str) -> str:
    """The id of an experiment, which is created where it does not exist; beside a sqlite store its files go to mlruns/."""
    with _alone():
        found = client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        local = uri().startswith("sqlite:///")
        return client.create_experiment(name, artifact_location=(home() / "mlruns" / name).as_uri() if local else None)


def experiment_name(folder: Path) -> str:
    """One experiment per study: the folder's name under pipelines/, and ``moecore`` for the main pipeline."""
    folder = folder.resolve()
    return folder.name if folder.parent.name == "pipelines" else "moecore"


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time: a fresh sqlite database that two open together is broken."""
    lock = home() / ".state" / "mlflow.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__

"""Where MLflow keeps its runs: $MLFLOW_TRACKING_URI, else a sqlite file in the repository."""

import fcntl
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from moecore.core.files import UserError, repository

IMPATIENT = {  # a dead server costs seconds; by default it would be four minutes a call
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
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
    return uri().startswith(("http://", "https://"))


def connect() -> Any:
    """An MlflowClient on the store, which is created where it is a file that does not exist.

    Raises UserError where the store does not answer within seconds.
    """
    for name, value in (IMPATIENT | SILENT).items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Here, as importing it takes a second and reads the environment that is set above.
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with alone("mlflow.lock"):
        client = MlflowClient(uri())
        try:
            client.search_experiments(max_results=1)  # creates the tables of a new database
        except (MlflowException, OSError) as error:
            raise UserError(
                f"{uri()}: MLflow does not answer ({first_line(error)}); "
                "the histories on disk are complete"
            ) from error
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
    history together make two runs of it.
    """
    lock = home() / ".state" / name
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a message."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__

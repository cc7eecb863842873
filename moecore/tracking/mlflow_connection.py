"""Connects to MLflow's store: $MLFLOW_TRACKING_URI, else a sqlite file in the project."""

import logging
import os
import re
import sqlite3
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from moecore.core.files import UserError, outermost_dvc_project
from moecore.core.source_layout import project_of_run_folder

SQLITE = "sqlite:///"
BUSY_SECONDS = 10.0  # to wait for another program that writes to the sqlite file
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # A dead server costs seconds; with MLflow's defaults, four minutes per call.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


def find_project_root() -> Path:
    if root := outermost_dvc_project():
        return root
    current = Path().resolve()
    for folder in (current, *current.parents):
        is_project = (folder / ".dvc").is_dir() or (folder / ".git").exists()
        if is_project and project_of_run_folder(folder) == folder:  # no study's run folder
            return folder
    return current


def store_address() -> str:
    # Absolute, because an experiment of DVC runs in another folder.
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{find_project_root() / 'mlflow.db'}"


def sqlite_store_path() -> Path | None:
    address = store_address()
    if address.startswith(SQLITE):
        return Path(address.removeprefix(SQLITE))
    return None


def mask_password(text: str) -> str:
    password = urlsplit(store_address()).password
    return text.replace(f":{password}@", ":***@") if password else text


def set_mlflow_timeouts_and_logging() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


@contextmanager
def mlflow_errors_as_user_errors() -> Iterator[None]:
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    # ImportError: the database's driver is not installed
    except (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError) as error:
        place = getattr(error, "filename", None) or mask_password(store_address())
        problem = f"{place}: MLflow cannot use it ({shorten_error(error)})"
        mend = "`moecore sync` imports what is missing once that is solved"
        raise UserError(f"{problem}; the histories on disk are complete: {mend}") from error


def shorten_error(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0]
    # Messages of the HTTP client have the address twice before the cause.
    if cause := re.search(r"Caused by \w+\((.*)\)\)$", line):
        line = cause[1].strip("\"'").rsplit("): ", 1)[-1]
    return mask_password(line) or type(error).__name__


def mlflow_import_lock() -> FileLock:
    """Return the lock that prevents two imports at a time, which would duplicate runs."""
    file = find_project_root() / ".state" / "import.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file)


def connect_store() -> Any:
    """Return a tested MlflowClient of the store; create a missing sqlite file."""
    set_mlflow_timeouts_and_logging()
    # Imported here: it takes a second, and reads the environment variables set above.
    from mlflow import MlflowClient

    file = sqlite_store_path()
    if file is not None and file.exists():
        try:  # MLflow itself would try for 100 s
            with closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as database:
                database.execute("BEGIN IMMEDIATE")  # lock it for writing, as an import does
        except sqlite3.Error as error:
            mend = "repair it, or move it away and run `moecore sync`"
            again = "all runs are imported again from artifacts/history"
            problem = f"MLflow's database cannot be used ({error})"
            raise UserError(f"{file}: {problem}; {mend}: {again}") from error
    with mlflow_errors_as_user_errors():
        if file is not None and not file.exists():
            # Under another name: a database whose creation was killed cannot be repaired.
            part = file.with_name(f"{file.name}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            MlflowClient(f"{SQLITE}{part}").search_experiments(max_results=1)
            part.replace(file)
        client = MlflowClient(store_address())
        client.search_experiments(max_results=1)
    return client


def experiment_name(folder: Path) -> str:
    """Return a study's experiment in MLflow: name of its run folder or of the project."""
    folder = folder.resolve()
    if project_of_run_folder(folder) != folder:
        return folder.name
    project = folder / "pyproject.toml"
    if not project.is_file():
        return "moecore"
    try:
        settings = tomllib.loads(project.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: too many nested brackets
        raise UserError(f"{project}: not valid TOML: {error}") from None
    return settings.get("project", {}).get("name", folder.name)


def get_or_create_experiment(client: Any, name: str) -> Any:
    experiment = client.get_experiment_by_name(name)
    # MLflow still reserves the name of a deleted experiment
    if experiment is not None and experiment.lifecycle_stage != "active":
        store = mask_password(store_address())
        number = experiment.experiment_id
        restore = f"MLFLOW_TRACKING_URI={store} mlflow experiments restore -x {number}"
        stores = f"--backend-store-uri {store} --tracking-uri {store}"
        remove = f"mlflow gc {stores} --experiment-ids {number}"
        deleted = f"{store}: the experiment {name!r} was deleted in MLflow"
        ways = f"restore it (`{restore}`), or remove it for good (`{remove}`)"
        raise UserError(f"{deleted}; {ways}, then run `moecore sync`")
    if experiment is None:
        files = (find_project_root() / "mlruns" / name).as_uri() if sqlite_store_path() else None
        kind = {"mlflow.experimentKind": "custom_model_development"}  # not for chats
        client.create_experiment(name, artifact_location=files, tags=kind)
    return client.get_experiment_by_name(name)

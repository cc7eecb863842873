"""What a store that does not answer costs, and what is said of it.

The time-outs of MLflow are for a pause between two bytes: a proxy that sends a byte a second is
never too slow for them. So each call has a limit of its own.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

from moecore.core.files import UserError, explain_full_disk
from moecore.tracking.database import ANEW, SQLITE, file_of

TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
IMPATIENT = {  # a dead server costs seconds; by default it would be four minutes a call
    TIMEOUT: "10",
    # A run whose answer was lost on the way would be made twice.
    RETRIES: "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # which may say an hour
}
LONGEST = 160  # characters of MLflow's words in a message
FILES = ("log_artifact", "log_artifacts")  # as long as they are big


def is_server(address: str) -> bool:
    """Whether a store is asked over HTTP."""
    return address.startswith(("http://", "https://"))


class Limited:
    """The client of a server; a call ends after ``seconds`` with a TimeoutError."""

    def __init__(self, client: Any, seconds: float) -> None:
        self._client = client
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name in FILES:
            return call

        def limited(*args: Any, **kwargs: Any) -> Any:
            return within(self._seconds, lambda: call(*args, **kwargs))

        return limited


def limit() -> int:
    """Seconds for one call: two time-outs, for each of its tries."""
    return 2 * _number(TIMEOUT) * (1 + _number(RETRIES))


def _number(name: str) -> int:
    """What the environment says of a limit, as MLflow reads it. Raises UserError."""
    found = os.environ.get(name, IMPATIENT[name])
    if not found.isdecimal():
        raise UserError(f"${name}: found {found!r}; allowed: a whole number, 0 or more")
    return int(found)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns; a TimeoutError where it takes longer, and it is left alone then."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised again in the thread that waits
            future.set_exception(error)

    # A daemon: a call that never ends does not keep the process.
    Thread(target=work, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # its own
            raise
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None


@contextmanager
def answering(address: str) -> Iterator[None]:
    """Whatever the store at ``address`` fails with is one line: a UserError."""
    from alembic.util import CommandError
    from google.protobuf.json_format import Error
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    file = file_of(address)
    try:
        with explain_full_disk(file) if file else nullcontext():
            yield
    # ImportError: of a database whose driver is not installed
    except (MlflowException, SQLAlchemyError, CommandError, Error, OSError, ImportError) as error:
        raise UserError(_said(address, error)) from error


def _said(address: str, error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; mend that and run `moecore sync`"
    why = first_line(error)
    file = file_of(address)
    if file is not None:
        return _of_file(file, why)
    if not is_server(address):
        return (
            f"{address}: MLflow cannot use it ({why}); allowed in $MLFLOW_TRACKING_URI: "
            "sqlite:////folder/mlflow.db, http://host:port"
        )
    return (
        f"{address}: MLflow does not answer ({why}); the histories on disk are complete: "
        "`moecore sync` imports what is missing once it does"
    )


def _of_file(file: Path, why: str) -> str:
    if "locked" in why:
        return f"{file}: locked by another program ({why}); end it and run `moecore sync`"
    if "schema" in why:
        return (
            f"{file}: made by another version of MLflow ({why}); `mlflow db upgrade "
            f"{SQLITE}{file}` mends an older one; else {ANEW}"
        )
    return f"{file}: MLflow cannot use it ({why}); mend that, or {ANEW}"


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a message."""
    line = str(error).strip().split("\n")[0]
    # A client of HTTP tells the address twice before it tells the cause.
    if cause := re.search(r"Caused by \w+\((.*)\)\)$", line):
        line = cause[1].strip("\"'").rsplit("): ", 1)[-1]
    line = re.sub(r"^API request to \S+ failed with exception ", "", line)
    if len(line) > LONGEST:
        line = line[:LONGEST].rpartition(". ")[0] or f"{line[:LONGEST]}…"
    return line or type(error).__name__

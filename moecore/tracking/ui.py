"""MLflow's page, and beside it the import of what is on disk, every few seconds."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.run.stage import end_with_parent
from moecore.tracking.answers import answering
from moecore.tracking.names import charts
from moecore.tracking.store import (
    SILENT,
    connect,
    experiment,
    experiment_name,
    home,
    is_server,
    uri,
)
from moecore.tracking.study import histories
from moecore.tracking.sync import Importer, told

EVERY = 5.0  # seconds
HOST = "127.0.0.1"
SERVER = SILENT | {
    # Its workers for evaluations of language models: nine processes, a gigabyte.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONWARNINGS": "ignore",
}


def ui(port: int = 5000) -> int:
    """Serve MLflow on 127.0.0.1 and import until the server ends; returns its exit code.

    Where $MLFLOW_TRACKING_URI is a server, this only imports, until it is interrupted.
    Raises UserError where the store does not answer or the port is taken.
    """
    if not is_server():
        _check_free(port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    client = connect()  # makes the tables of a new database, as the server would at the same time
    try:
        if is_server():
            print(f"{uri()}: runs are imported every {EVERY:.0f} s", flush=True)
            _import_while(lambda: True)
        with answering(uri()):
            page = charts(f"http://{HOST}:{port}", _opened(client))
        return _import_beside(_serve(port), page)
    except KeyboardInterrupt:  # Ctrl-C is how it is meant to end
        return 0


def _import_beside(server: subprocess.Popen, page: str) -> int:
    print(f"{page}\nMLflow starts; runs are imported every {EVERY:.0f} s", flush=True)
    try:
        _import_while(lambda: server.poll() is None)
    finally:
        _stop(server)
    return server.returncode


def _opened(client: Any) -> str | None:
    """The experiment to begin with: that of the folder that `moecore ui` is called in."""
    folder = Path().resolve()
    if not any(histories(folder)):
        folder = home()
    if not any(histories(folder)):
        return None  # nothing has run yet
    return experiment(client, experiment_name(folder))


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port}: another program answers there; choose another by --port")


def _serve(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "uvicorn", "--factory", "moecore.tracking.names:app"]
    command += ["--host", HOST, "--port", str(port), "--log-level", "warning"]
    # A group of its own: Ctrl-C ends it through `_stop`, with all that it started.
    return subprocess.Popen(
        command, env=os.environ | SERVER, start_new_session=True, preexec_fn=end_with_parent
    )


def _stop(server: subprocess.Popen) -> None:
    if server.poll() is not None:
        return
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _import_while(serving: Callable[[], bool]) -> None:
    """Import every few seconds. What hinders an import is said once, and it is tried again."""
    hindered = None  # what the last import failed for; None before the first
    importer = Importer()
    while serving():
        try:
            counts = importer.update()
        except UserError as error:
            if str(error) != hindered:
                hindered = str(error)
                print(hindered, flush=True)
        else:
            if counts.added or hindered != "":
                print(told(counts), flush=True)
            hindered = ""
        time.sleep(EVERY)

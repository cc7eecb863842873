"""MLflow's page, and beside it the import of what is on disk, every few seconds."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from moecore.core.files import UserError
from moecore.run.stage import end_with_parent
from moecore.tracking.store import SILENT, connect, first_line, is_server, uri
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
    connect()  # makes the tables of a new database, as the server would at the same time
    try:
        if is_server():
            print(f"{uri()}: runs are imported every {EVERY:.0f} s", flush=True)
            _import_while(lambda: True)
        return _import_beside(_serve(port), port)
    except KeyboardInterrupt:  # Ctrl-C is how it is meant to end
        return 0


def _import_beside(server: subprocess.Popen, port: int) -> int:
    # The page for training; by itself MLflow opens the one for chats.
    page = f"http://{HOST}:{port}/#/experiments?workflowType=machine_learning"
    print(f"{page}: MLflow starts; runs are imported every {EVERY:.0f} s", flush=True)
    try:
        _import_while(lambda: server.poll() is None)
    finally:
        _stop(server)
    return server.returncode


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port}: another program answers there; choose another by --port")


def _serve(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri()]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
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
    from mlflow.exceptions import MlflowException

    importer = Importer()
    hindered = None  # what the last import failed for; None before the first
    while serving():
        try:
            counts = importer.update()
        except (UserError, MlflowException, OSError) as error:
            if first_line(error) != hindered:
                hindered = first_line(error)
                print(hindered, flush=True)
        else:
            if counts.added or hindered != "":
                print(told(counts), flush=True)
            hindered = ""
        time.sleep(EVERY)

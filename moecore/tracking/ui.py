"""MLflow's own server, and beside it the import of what is on disk, every few seconds."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moecore.core.files import UserError
from moecore.run.stage_entry import end_with_parent
from moecore.tracking import mlflow_connection
from moecore.tracking.sync import Importer, describe_import, view_address

SECONDS = 5.0  # between two imports
HOST = "127.0.0.1"


def serve_ui(port: int = 5000) -> int:
    """Import, then serve MLflow on 127.0.0.1 and import until it ends; returns its exit code.

    Where $MLFLOW_TRACKING_URI is a server, this only imports, until it is interrupted.
    Raises UserError where the store does not answer at first, or the port is taken.
    """
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port}: another program answers there; choose another by --port")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    importer = Importer()
    try:
        print(describe_import(importer.import_all()), flush=True)
        if mlflow_connection.store_address().startswith(("http://", "https://")):
            import_while(lambda: True, importer)
        experiment = mlflow_connection.connect_store().get_experiment_by_name(
            mlflow_connection.experiment_name(Path())
        )
        server = start_server(port)
        try:
            address = f"http://{HOST}:{port}"
            print(view_address(address, experiment) if experiment else address, flush=True)
            import_while(lambda: server.poll() is None, importer)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)  # with its workers; what sqlite has is whole
            server.wait()
        return server.returncode
    except KeyboardInterrupt:  # Ctrl-C is how it is meant to end
        return 0


def start_server(port: int) -> subprocess.Popen:
    """Start `mlflow server`, which ends with this process."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    command += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    # In its environment, as a list of processes shows the words of a command.
    settings = mlflow_connection.ENVIRONMENT | {
        "MLFLOW_BACKEND_STORE_URI": mlflow_connection.store_address(),
        "MLFLOW_ARTIFACTS_DESTINATION": str(mlflow_connection.project_root() / "mlartifacts"),
        # Its workers for evaluations of language models: nine processes, a gigabyte.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONWARNINGS": "ignore",
    }
    # A group of its own, which Ctrl-C does not reach.
    return subprocess.Popen(
        command, env=os.environ | settings, start_new_session=True, preexec_fn=end_with_parent
    )


class HeldInterrupts:
    """Ctrl-C as KeyboardInterrupt in ``sleep`` alone, or when it comes again: where it interrupts
    a destructor, as of SQLAlchemy during an import, Python prints the exception and goes on.
    """

    def __init__(self) -> None:
        self.is_sleeping = self.has_come = False
        signal.signal(signal.SIGINT, self._receive)

    def _receive(self, *_: object) -> None:
        is_second, self.has_come = self.has_come, True
        if self.is_sleeping or is_second:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises KeyboardInterrupt for what comes meanwhile or came before."""
        self.is_sleeping = True  # before the look at what came: nothing falls between
        if self.has_come:
            raise KeyboardInterrupt
        time.sleep(seconds)
        self.is_sleeping = False


def import_while(is_serving: Callable[[], bool], importer: Importer) -> None:
    """Import every few seconds. What hinders an import is said once, and it is tried again."""
    last = ""
    interrupts = HeldInterrupts()
    while is_serving():
        interrupts.sleep(SECONDS)
        try:
            counts = importer.import_all()
            said = describe_import(counts) if counts["runs added"] else ""
        except UserError as error:
            said = str(error)
        if said not in ("", last):
            print(said, flush=True)
            last = said

"""``moecore ui``: runs MLflow's server, and imports histories every few seconds."""

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
from moecore.tracking.sync import AllStudiesImporter, describe_import, view_address

SECONDS_BETWEEN_IMPORTS = 5.0  # between imports
HOST = "127.0.0.1"


def serve_ui(port: int = 5000) -> int:
    """Run MLflow's server until it ends, and import meanwhile; return its exit code."""
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port}: another program answers there; choose another by --port")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    importer = AllStudiesImporter()
    try:
        runs = sum(map(len, importer.read_studies().values()))
        store = mlflow_connection.mask_password(mlflow_connection.store_address())
        print(f"importing new results of {runs} runs into {store} …", flush=True)
        print(describe_import(importer.import_all()), flush=True)
        # a server: only import, until interrupted
        if mlflow_connection.store_address().startswith(("http://", "https://")):
            import_while_serving(lambda: True, importer)
        name = mlflow_connection.experiment_name(Path())
        experiment = mlflow_connection.connect_store().get_experiment_by_name(name)
        server = start_server(port)
        try:
            address = f"http://{HOST}:{port}"
            if experiment:
                print(f"compare: {view_address(address, experiment, 'CHART')}", flush=True)
                address = view_address(address, experiment)
            print(address, flush=True)
            import_while_serving(lambda: server.poll() is None, importer)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)  # with its workers; sqlite survives it
            server.wait()
        return server.returncode
    except KeyboardInterrupt:  # Ctrl-C is the normal end
        return 0


def start_server(port: int) -> subprocess.Popen:
    """Start ``mlflow server`` as a process that ends with this one."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    command += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    # In the environment, because a list of processes shows the arguments of a command.
    settings = mlflow_connection.ENVIRONMENT | {
        "MLFLOW_BACKEND_STORE_URI": mlflow_connection.store_address(),
        "MLFLOW_ARTIFACTS_DESTINATION": str(mlflow_connection.find_project_root() / "mlartifacts"),
        # Workers for evaluations of language models would take nine processes and a gigabyte.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONWARNINGS": "ignore",
    }
    # A new session, which Ctrl-C does not reach.
    return subprocess.Popen(
        command, env=os.environ | settings, start_new_session=True, preexec_fn=end_with_parent
    )


# In a destructor, such as SQLAlchemy's during an import, Python would print and ignore it.
class DelayedInterruptHandler:
    """Ctrl-C handler: raises KeyboardInterrupt only during ``sleep``, or at the second Ctrl-C."""

    def __init__(self) -> None:
        self.is_sleeping = self.has_come = False
        signal.signal(signal.SIGINT, self._receive)

    def _receive(self, *_: object) -> None:
        is_second = self.has_come
        self.has_come = True
        if self.is_sleeping or is_second:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Sleep; raise KeyboardInterrupt if Ctrl-C was pressed before or meanwhile."""
        self.is_sleeping = True  # set before the check, so that no signal is missed
        if self.has_come:
            raise KeyboardInterrupt
        time.sleep(seconds)
        self.is_sleeping = False


def import_while_serving(is_serving: Callable[[], bool], importer: AllStudiesImporter) -> None:
    """Import every few seconds while ``is_serving``; print an error once."""
    last = ""
    interrupts = DelayedInterruptHandler()
    while is_serving():
        interrupts.sleep(SECONDS_BETWEEN_IMPORTS)
        try:
            counts = importer.import_all()
            message = describe_import(counts) if counts["runs added"] else ""
        except UserError as error:
            message = str(error)
        if message not in ("", last):
            print(message, flush=True)
            last = message

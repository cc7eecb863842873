"""A server that imports all stages once and forks a process per stage, to save 3 s of imports.

DVC starts stages through the command ``python`` in the server's folder ``bin``, first in its PATH.
Such a process prints, exits and is killed like any other. Linux only, and without a GPU: CUDA does
not survive a fork.
"""

import atexit
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from moecore.core import files, source_layout
from moecore.run import stage_entry, stage_inputs

CLIENT = Path(__file__).with_name("stage_client.py")

Stages = Mapping[str, Callable[..., None]]


def start_stage_server(module: str = f"{source_layout.STAGES_PREFIX}fork_server") -> Path:
    """Start a server that forks stages until we end; return its folder: socket and bin/python."""
    folder = Path(tempfile.mkdtemp(prefix="moecore-"))
    path = folder / "socket"
    command = folder / "bin/python"
    command.parent.mkdir()
    client = shlex.join([sys.executable, "-IS", str(CLIENT), sys.executable])
    command.write_text(f'#!/bin/sh\nexec {client} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    # One thread: nothing is computed before a fork, and each stage sets its own number.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", module, str(path)], env=environment)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    while not path.exists():  # no time limit: imports take minutes on a cold disk
        if (code := process.poll()) is not None:
            end = f"exit code {code}" if code >= 0 else f"signal {-code}"
            ended = f"`{sys.executable} -m {module}` ended with {end} before it listened"
            mend = "its error is printed above; mend that and start again"
            raise files.UserError(f"server of stages: {ended}; {mend}")
        time.sleep(0.02)
    return folder


def serve_stages(path: str, stages: Stages) -> None:
    # A request is one line of JSON, [folder, ["moecore.stages.x", word, …], environment], with the
    # descriptors of stdout and stderr. The answers are the process id, and later the exit code.
    stage_entry.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of _answer
    with socket.socket(socket.AF_UNIX) as listening:
        # Renamed only when it listens, so a client that finds the socket can connect.
        listening.bind(f"{path}.new")
        listening.listen(16)
        os.rename(f"{path}.new", path)
        stage_inputs.store_hashes_of_imported_sources()  # takes a second, in which DVC starts
        while True:
            line, _ = listening.accept()
            if os.fork() == 0:
                _serve_request(line, stages)
            line.close()


def _serve_request(line: socket.socket, stages: Stages) -> None:
    """Fork the requested stage; send its process id and exit code to the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(line, 1, 2)
    request = line.makefile().readline()
    if not request.endswith("\n"):  # killed before it had asked
        os._exit(0)
    folder, arguments, environment = json.loads(request)
    pid = os.fork()
    if not pid:
        line.close()
        _run_forked_stage(stages, folder, arguments, environment, descriptors)
    with suppress(ConnectionError):  # where the client is gone by now, ``select`` says so
        line.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, line], [], [])[0]:
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    try:
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    finally:
        os._exit(0)


def _run_forked_stage(
    stages: Stages,
    folder: str,
    arguments: list[str],
    environment: Mapping[str, str],
    descriptors: list[int],
) -> None:
    """Run a stage in this forked process, and exit; descriptors: stdout and stderr."""
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = int(environment.get("OMP_NUM_THREADS") or files.available_cores())
    torch.set_num_threads(threads)
    name, *rest = arguments
    sys.argv = [name, *rest]
    code: Any = 0
    with threadpool_limits(threads, user_api="blas"):
        try:
            stage_entry.run_stage(stages[name.removeprefix(source_layout.STAGES_PREFIX)], rest)
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # as in Python: a message, and exit code 1
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))

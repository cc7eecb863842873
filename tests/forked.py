"""Stages and commands as forked processes (command_server.py): by hand, killed at any moment."""

# They run the code of this repository: a test that edits the code of its copy has to do without
# (``Project.forked = False``).

import atexit
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil

from moecore.core.source_layout import ROOT

CLIENT = Path(__file__).with_name("command_client.py")
SHARED = "TESTS_SERVER"  # the folder of the server that all workers of a test run have in common


def start() -> Path:
    """Start a server that ends with this process; return its folder, before it listens."""
    folder = Path(tempfile.mkdtemp(prefix="moecore-"))
    (folder / "bin").mkdir()
    for name in ("python", "dvc"):
        command = folder / "bin" / name
        words = shlex.join([sys.executable, "-IS", str(CLIENT), sys.executable, name])
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    words = [sys.executable, "-m", "tests.command_server", str(folder / "socket")]
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (folder / "pid").write_text(str(process.pid))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    return folder


@cache
def server() -> Path:
    folder = Path(os.environ.get(SHARED) or start())
    process = psutil.Process(int((folder / "pid").read_text()))
    while not (folder / "socket").exists():  # no time limit: imports take minutes on a cold disk
        assert process.status() != psutil.STATUS_ZOMBIE, "the server of commands has ended"
        time.sleep(0.02)
    return folder


class Stage:
    def __init__(self, folder: Path, words: Sequence[str], env: dict[str, str]) -> None:
        self.printed = [tempfile.TemporaryFile("w+") for _ in ("stdout", "stderr")]
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(str(server() / "socket"))
        socket.send_fds(self.line, [b"."], [stream.fileno() for stream in self.printed])
        request = json.dumps([str(folder), [f"moecore.stages.{words[0]}", *words[1:]], env])
        self.line.sendall(f"{request}\n".encode())
        self.answer = self.line.makefile()
        self.pid = int(self.answer.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.answer.readline()

    def runs(self) -> bool:
        self.line.setblocking(False)
        try:
            return not self.line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.line.setblocking(True)

    def wait(self) -> tuple[int, str, str]:
        code = int(self.answer.readline())
        for stream in self.printed:
            stream.seek(0)
        out, err = (stream.read() for stream in self.printed)
        return code, out, err


def run(folder: Path, words: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess(words, *Stage(folder, words, env).wait())

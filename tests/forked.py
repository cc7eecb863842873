"""Stages and commands as forked processes (command_server.py): by hand, killed at any moment."""

# They run the code of this repository: a test that edits the code of its copy has to do without
# (``Project.forked = False``).

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from moecore.core.source_layout import ROOT
from moecore.pipeline.stage_fork_server import start_stage_server

CLIENT = Path(__file__).with_name("command_client.py")


@cache
def server() -> Path:
    with contextlib.chdir(ROOT):  # there Python finds the module
        started = start_stage_server("tests.command_server")
    for name in ("python", "dvc"):
        command = started / "bin" / name
        words = shlex.join([sys.executable, "-IS", str(CLIENT), sys.executable, name])
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    return started


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

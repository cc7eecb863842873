"""Stages forked from a server: they print, exit and end as processes of their own would."""

import os
import re
import subprocess
import time

import pytest

from stages import server as stages_server
from tests import forked
from tests.project import PARAMS, ROOT, Project


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    project = Project(tmp_path_factory.mktemp("forked"), PARAMS)
    project.stage("prepare", "pretrain")
    return project


def test_every_stage_of_the_pipeline_is_served():
    served = {stage.__name__ for stage in stages_server.STAGES}
    used = set()
    for file in [ROOT / "dvc.yaml", *(ROOT / "pipelines").glob("*/dvc.yaml")]:
        used |= set(re.findall(r"-m stages\.(\w+)", file.read_text(encoding="utf-8")))
    assert used <= served


def test_nothing_computes_before_a_fork(project):
    """A process with several threads must not fork: their locks would stay taken for ever."""
    socket = str(forked.server().socket)
    # The first of them; the others are its forks, each waiting for a stage.
    server = min(
        int(name) for name in os.listdir("/proc") if name.isdigit() and served(name, socket)
    )
    assert len(os.listdir(f"/proc/{server}/task")) == 1


def served(process: str, socket: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8") as file:
            return f"stages.server\0{socket}\0" in file.read()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-m", "stages.prepare"], 2, "usage: python -m stages.prepare NAME (0 given)"),
        (["-m", "stages.prepare", "nothing"], 1, "data.nothing"),
        (["-c", "import sys; print('plain', file=sys.stderr)"], 0, "plain"),
    ],
)
def test_the_command_python(project, words, code, said):
    done = project.attempt(["python", *words])
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_stage_ends_with_who_started_it(project):
    project.stage("teacher_router", "dense")
    project.edit("pretrain:\n  {epochs: 2, batch: 64", "pretrain:\n  {epochs: 2000, batch: 64")
    words = ["python", "-m", "stages.pretrain", "dense", "0"]
    started = subprocess.Popen(words, cwd=project.folder, env=project.environment)
    while not any((project.folder / ".state").rglob("*.safetensors")):
        assert started.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.05)
    started.kill()
    started.wait()
    until = time.monotonic() + 20
    while running(project):
        assert time.monotonic() < until, "the stage goes on without its client"
        time.sleep(0.05)


def running(project: Project) -> list[str]:
    """Processes that work in the folder of the project."""
    found = []
    for process in os.listdir("/proc"):
        try:
            if process.isdigit() and os.readlink(f"/proc/{process}/cwd") == str(project.folder):
                found.append(process)
        except OSError:
            continue
    return found

"""``python -m tests.command_server SOCKET``: forks stages, ``dvc``, ``moecore`` and scripts."""

# Each is a process of its own, but none imports DVC and torch, or hashes this repository's code,
# again; tests/command_client.py asks it.

import json
import shutil
import sys

# What these commands import when they are called
import dvc.repo.graph
import dvc.repo.metrics.show
import dvc.repo.reproduce
import dvc.repo.status  # noqa: F401
import networkx  # noqa: F401
import torch
from dvc.cli import main as dvc_main
from dvc.cli import parse_args

import moecore.pipeline.parallel
import moecore.report.tables.metrics_by_method
import moecore.study.check  # noqa: F401
from moecore.core.source_layout import ROOT
from moecore.pipeline import cli, code_hashes, stage_fork_server
from moecore.stages.fork_server import STAGES
from moecore.study.yaml_document import load_yaml_document


def command(words: str) -> None:
    sys.argv = json.loads(words)
    sys.executable = shutil.which("python") or sys.executable  # the client, which asks for jobs
    sys.exit(dvc_main() if sys.argv[0] == "dvc" else cli.app())


def script(code: str) -> None:
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler
    parse_args(["status"])
    code_hashes.compute_code_hashes(load_yaml_document(str(ROOT / "tests/params.yaml")))
    stage_fork_server.serve_stages(sys.argv[1], STAGES | {"command": command, "script": script})

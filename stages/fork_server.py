"""Server that forks stages for ``moecore run``: python -m moecore.stages.fork_server SOCKET."""

import pkgutil
import sys
from collections.abc import Callable

import scipy.stats  # noqa: F401 - the first interval of a process would import it
import torch

from moecore.pipeline.stage_fork_server import serve_stages
from moecore.study.stages import STAGE_ROWS

STAGES: dict[str, Callable[..., None]] = {  # a script holds a function of its name
    stage.module: pkgutil.resolve_name(f"moecore.stages.{stage.module}:{stage.module}")
    for stage in STAGE_ROWS
    if "cmd" not in stage.entry
}

if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler
    serve_stages(sys.argv[1], STAGES)

"""Where jobs run: the environments of their processes, with GPUs or shares of the cores."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moecore.core.files import UserError
from moecore.core.operating_system import available_cores
from moecore.pipeline.stage_client import SOCKET
from moecore.run.cluster_launcher import CLUSTER, read_cluster

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES = ("MOECORE_THREADS", "OMP_NUM_THREADS")  # the second: of BLAS under numpy


def job_environments(jobs: int) -> list[dict[str, str]]:
    """Return the environments of ``jobs`` processes: a GPU each, and more where a stage wants more;
    or else a share of the cores, unless MOECORE_THREADS says how many; nothing where a cluster's
    launcher gives them. Raises UserError where a stage wants more GPUs than there are.
    """
    path = os.environ.get(CLUSTER)
    cluster = read_cluster(path) if path is not None else None
    gpus = list_gpus() if cluster is None or not cluster.gives_gpus else []
    if gpus:
        wanted = {} if cluster is None else cluster.gpus
        for stage, number in wanted.items():
            if number > len(gpus):
                wrong = f"{path}: {stage}.gpus: found {number}"
                raise UserError(f"{wrong}; this machine may use {len(gpus)}: {', '.join(gpus)}")
        places = max(jobs, *wanted.values(), 1)
        return [{VISIBLE_GPUS: gpus[place % len(gpus)]} for place in range(places)]
    if cluster is not None:
        return [{} for _ in range(jobs)]
    share = str(max(1, available_cores() // jobs))
    threads = os.environ.get(THREAD_VARIABLES[0]) or share
    return [dict.fromkeys(THREAD_VARIABLES, threads) for _ in range(jobs)]


def job_gpu_count(stages: Sequence[str]) -> int:
    """Return how many GPUs of this machine the stages of a job want; 1 without a cluster file."""
    if CLUSTER not in os.environ:
        return 1
    cluster = read_cluster(os.environ[CLUSTER])
    return max(1, *(cluster.needs(stage.partition("@")[0]).gpus for stage in stages))


def choose_places(
    stages: Sequence[str], free: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]] | None:
    """Return the ``free`` places that a job takes, one or one per GPU; None where too few."""
    if not free:
        return None
    by_gpu = {place[VISIBLE_GPUS]: place for place in reversed(free) if VISIBLE_GPUS in place}
    if not by_gpu:
        return [free[-1]]
    wanted = job_gpu_count(stages)
    return list(by_gpu.values())[:wanted] if len(by_gpu) >= wanted else None


def merge_environments(places: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The environment of a job that has all of these places."""
    environment = dict(places[0])
    if VISIBLE_GPUS in environment:
        environment[VISIBLE_GPUS] = ",".join(place[VISIBLE_GPUS] for place in places)
    return environment


def list_gpus() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get(VISIBLE_GPUS)
    if given is None:
        return [str(card) for card in range(count)]
    return [card.strip() for card in given.split(",")][:count]


def add_stage_server(environments: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the environments with a server of stages, where they may be forked.

    Where not, ``python`` is the one that runs this process, first in the PATH.
    """
    import torch

    if SOCKET in os.environ:
        return environments
    if sys.platform != "linux" or torch.cuda.device_count() or CLUSTER in os.environ:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return [environment | {"PATH": path} for environment in environments]
    from moecore.pipeline.stage_fork_server import start_stage_server

    forking = start_stage_server().environment()
    return [environment | forking for environment in environments]


def default_jobs() -> int:
    """Return how many jobs run at a time: one per GPU; without one, one per core, at most 4."""
    import torch

    return torch.cuda.device_count() or min(4, available_cores())

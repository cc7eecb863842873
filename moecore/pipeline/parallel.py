"""``dvc repro`` with several stages at a time.

Small models leave cores idle: two processes of one thread each train them faster than one process
of two threads. With GPUs every job has one of its own. Each job is a ``dvc repro --single-item`` of
a few stages that follow each other, so cache, lock file and run cache are DVC's own; stages still
share nothing but files.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from moecore.core.files import UserError
from moecore.pipeline.client import SOCKET
from moecore.pipeline.plan import asked, changed_by_code, plan
from moecore.run.launch import CLUSTER

# DVC's words where two processes meet at a path
SHARED = re.compile(r"is busy, it is being (?:read|written|blocked)|Unable to acquire lock")
ADVICE = ("To track the changes", "\tgit add", "To enable auto", "\tdvc config", "Use `dvc push`")
TRIES = 5
# On all cores: everything waits for the code, the data and a single teacher; `cost` measures time
ALONE = ("code", "prepare", "teacher", "cost", "measure@cost")
THREADS = ("MOECORE_THREADS", "OMP_NUM_THREADS")  # the second: of BLAS under numpy and scipy
# Guided methods of a seed wait for the first two; the third looks at all models in one process
FIRST = ("teacher", "teacher_router", "transfer")


class Job(NamedTuple):
    """Stages that one process runs one after the other."""

    stages: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.stages[0] if len(self.stages) == 1 else f"{self.stages[0]} … {self.stages[-1]}"


def next_job(
    above: Mapping[str, Collection[str]], done: Collection[str], taken: Collection[str]
) -> Job | None:
    """The stages that a free process should run now, or None where it has to wait.

    above: the direct ancestors of every stage, each after its ancestors; taken: stages that run,
    or were run. A job is a stage whose ancestors are done, and those of the same method and seed
    that need nothing but it and what is done: its trainings, or its measurements. Trainings come
    first, as they take longest, so that the measurements fill the processes evenly at the end.
    Stages that want the machine for themselves come when nothing else runs, as one job.
    """
    ready = [stage for stage in above if stage not in taken and set(above[stage]) <= set(done)]
    alone = [stage for stage in ready if _alone(stage, above)]
    if len(alone) == len(ready):
        return Job(tuple(alone)) if ready and set(taken) == set(done) else None
    shared = [stage for stage in ready if stage not in alone]
    first = [stage for stage in shared if _kind(stage) in FIRST]
    if first:
        return Job(tuple(stage for stage in first if _seed(stage) == _seed(first[0])))
    chosen = shared[:1]
    for stage in above:
        alike = _work(stage) == _work(chosen[0]) is not None and not _alone(stage, above)
        if alike and stage not in (*chosen, *taken) and set(above[stage]) <= {*done, *chosen}:
            chosen.append(stage)
    return Job(tuple(chosen))


def _kind(stage: str) -> str:
    return stage.partition("@")[0]


def _alone(stage: str, above: Collection[str]) -> bool:
    """Whether a stage of those in ``above`` wants the machine for itself; of several teachers none
    does, as each seed has its own.
    """
    if _kind(stage) == "teacher":
        return sum(_kind(other) == "teacher" for other in above) == 1
    return stage.split("-")[0] in ALONE or _kind(stage) in ALONE


def _seed(stage: str) -> str:
    """The last word of a stage's item: ``0`` of ``teacher@0`` and ``teacher_router@tgr-0``."""
    return stage.partition("@")[2].split("-")[-1]


class Work(NamedTuple):
    """What is done with one method and seed: both trainings, or the measurements of one phase."""

    model: str  # vmoe-0
    phase: str  # "" for the trainings


def _work(stage: str) -> Work | None:
    """None for a stage of no single method and seed.

    ``pretrain@vmoe-0`` and ``finetune@vmoe-0`` train; ``calibrate@pretrain-vmoe-0`` and
    ``measure@cost-finetune-vmoe-0`` look at what was trained.
    """
    *_, phase, method, seed = ["", "", *stage.partition("@")[2].split("-")]
    if not (method and seed.isdigit()) or _kind(stage) == "transfer":
        return None
    return Work(f"{method}-{seed}", phase)


def pending() -> dict[str, set[str]]:
    """The stages that have to run, each after its ancestors, with those of them right above it."""
    pipeline = asked()
    stages = [item.stage for item in plan(pipeline, {}, changed_by_code(pipeline))]
    return {
        stage: {before for before, after in pipeline.edges if after == stage and before in stages}
        for stage in stages
    }


def devices(jobs: int) -> list[dict[str, str]]:
    """The environment of each of ``jobs`` processes: a GPU, or else its share of the cores; nothing
    where a cluster's launcher gives them.
    """
    if CLUSTER in os.environ:
        return [{} for _ in range(jobs)]
    if given := cards():
        return [{"CUDA_VISIBLE_DEVICES": given[job % len(given)]} for job in range(jobs)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return [dict.fromkeys(THREADS, threads) for _ in range(jobs)]


def cards() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(card) for card in range(count)]
    return [card.strip() for card in given.split(",")][:count]


def _all_cores(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in THREADS}


def with_server(environments: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same with a server of stages, where stages may be forked; see forked.py."""
    import torch

    elsewhere = CLUSTER in os.environ or SOCKET in os.environ
    if sys.platform != "linux" or torch.cuda.device_count() or elsewhere:
        return environments
    from moecore.pipeline.forked import start_server

    forking = start_server().environment()
    return [environment | forking for environment in environments]


def usual_jobs() -> int:
    """As many as there are GPUs; without one, as many as cores, at most 4."""
    import torch

    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def run_job(job: Job, environment: Mapping[str, str], started: list[subprocess.Popen]) -> int:
    """DVC's exit code for the stages of a job; its output is passed on line by line.

    Where DVC stops only because another process is at the same path, the rest is tried again.
    """
    for _ in range(TRIES):
        words = ["--wait-for-lock", "repro", "--single-item", *job.stages]
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", *words],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        met = False
        for line in process.stdout or ():
            met = met or bool(SHARED.search(line))
            if line.strip() and not line.startswith(ADVICE):
                print(line, end="", flush=True)
        code = process.wait()
        if code == 0 or not met:
            break
    return code


def run(
    above: Mapping[str, Collection[str]], environments: Sequence[Mapping[str, str]]
) -> list[str]:
    """Run all stages, as many at a time as there are ``environments``.

    Returns those that were not finished: nothing new starts after a failure.
    """
    done: set[str] = set()
    taken: set[str] = set()
    free = list(environments)
    running: dict[Future, tuple[Job, Mapping[str, str]]] = {}
    started: list[subprocess.Popen] = []
    failed = False
    with ThreadPoolExecutor(len(environments)) as pool:
        try:
            while True:
                while free and not failed and (job := next_job(above, done, taken)):
                    taken |= set(job.stages)
                    place = free.pop()
                    given = _all_cores(place) if _alone(job.stages[0], above) else place
                    running[pool.submit(run_job, job, given, started)] = (job, place)
                if not running:
                    return [stage for stage in above if stage not in done]
                finished: set[Future] = wait(running, return_when=FIRST_COMPLETED).done
                for future in finished:
                    job, place = running.pop(future)
                    free.append(place)
                    failed = failed or future.result() != 0
                    done |= set(job.stages) if future.result() == 0 else set()
        except BaseException:
            for process in started:  # DVC ends its stages: they watch their parent
                process.terminate()
            raise


def reproduce(jobs: int | None = None) -> None:
    """Run the stages that have to; jobs: how many at a time, None for as many as is usual here.

    Raises UserError where some are not done; what stopped them is printed before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stages = pending()
    if not stages:
        print("Nothing to do: everything is up to date.")
        return
    left = run(stages, with_server(devices(jobs or usual_jobs())))
    if left:
        named = ", ".join(left[:5]) + (" …" if left[5:] else "")
        found = f"{len(left)} of {len(stages)} stages are not done: {named}"
        raise UserError(f"{found}; the error stands above")

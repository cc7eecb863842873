"""``dvc repro`` with several stages at a time. ``python -m moecore.parallel [--jobs N]``

Small models leave cores idle: two processes of one thread each train them faster than one process of two threads. With GPUs
every job has one of its own. Each job is a ``dvc repro --single-item`` of a few stages that follow each other, so cache,
lock file and run cache are DVC's own; stages still share nothing but files.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from moecore.files import StageError
from moecore.plan import QUICK, asked, plan, settled

SHARED = re.compile(r"is busy, it is being (?:read|written|blocked)|Unable to acquire lock")  # DVC's words where two processes meet at a path
TRIES = 5
ALONE = ("prepare", "teacher", "cost")  # on all cores: everything waits for the data and the teacher, and `cost` times what it does


class Job(NamedTuple):
    """Stages that one process runs one after the other."""

    stages: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.stages[0] if len(self.stages) == 1 else f"{self.stages[0]} … {self.stages[-1]}"


def next_job(above: Mapping[str, Collection[str]], done: Collection[str], taken: Collection[str]) -> Job | None:
    """The stages that a free process should run now, or None where it has to wait.

    above: the direct ancestors of every stage, each after its ancestors; taken: stages that run, or were run.
    A job is a stage whose ancestors are done, and those of the same model that need nothing but it and what is done: a model's trainings,
    or its measurements. Trainings come first, as they take longest, so that the measurements fill the processes evenly at the end.
    Stages that want the machine for themselves come last, when nothing else runs, as one job.
    """
    ready = [stage for stage in above if stage not in taken and set(above[stage]) <= set(done)]
    alone = [stage for stage in ready if _kind(stage) in ALONE]
    if len(alone) == len(ready):
        return Job(tuple(alone)) if ready and set(taken) == set(done) else None
    if quick := [stage for stage in ready if _kind(stage) in QUICK]:  # starting DVC for every one would take longer than they do
        return Job(tuple(quick))
    chosen = [next(stage for stage in ready if stage not in alone)]
    for stage in above:
        alike = _item(stage) == _item(chosen[0]) != "" and _kind(stage) not in ALONE
        if alike and stage not in (*chosen, *taken) and set(above[stage]) <= {*done, *chosen}:
            chosen.append(stage)
    return Job(tuple(chosen))


def _kind(stage: str) -> str:
    return stage.partition("@")[0]


def _item(stage: str) -> str:
    """The model: ``pretrain@vmoe-0`` and ``finetune@vmoe-0`` → vmoe-0, ``calibrate@pretrain-vmoe-0`` → pretrain-vmoe-0; "" where it has no seed."""
    item = stage.partition("@")[2]
    return item if item.rpartition("-")[2].isdigit() else ""


def pending() -> dict[str, set[str]]:
    """The direct ancestors, among those that have to run, of every stage that has to run, each after its ancestors."""
    status, edges = asked()
    stages = [item.stage for item in plan(status, edges, {}, settled(status))]
    return {stage: {before for before, after in edges if after == stage and before in stages} for stage in stages}


def devices(jobs: int) -> list[dict[str, str]]:
    """The environment of each of ``jobs`` processes: a GPU of its own where there are some, else its share of the cores."""
    import torch

    if cards := torch.cuda.device_count():
        return [{"CUDA_VISIBLE_DEVICES": str(job % cards)} for job in range(jobs)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return [{"MOECORE_THREADS": threads, "OMP_NUM_THREADS": threads} for _ in range(jobs)]  # the second: of BLAS under numpy and scipy


def usual_jobs() -> int:
    """As many as there are GPUs; without one, as many as cores, at most 4."""
    import torch

    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def run_job(job: Job, environment: Mapping[str, str], started: list[subprocess.Popen]) -> int:
    """DVC's exit code for the stages of a job; its output is passed on line by line.

    Where DVC stops only because another process is at the same path, the rest of the job is tried again.
    """
    for _ in range(TRIES):
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *job.stages]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        met = False
        for line in process.stdout:
            met = met or bool(SHARED.search(line))
            if line.strip() and not line.startswith(("To track the changes", "\tgit add", "To enable auto", "\tdvc config", "Use `dvc push`")):
                print(line, end="", flush=True)
        if process.wait() == 0 or not met:
            break
    return process.returncode


def run(above: Mapping[str, Collection[str]], environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Run all stages, as many at a time as there are ``environments``; returns those that were not finished: nothing new starts after a failure."""
    done: set[str] = set()
    taken: set[str] = set()
    free, running, started, failed = list(environments), {}, [], False
    with ThreadPoolExecutor(len(environments)) as pool:
        try:
            while True:
                while free and not failed and (job := next_job(above, done, taken)):
                    taken |= set(job.stages)
                    place = free.pop()
                    whole = _kind(job.stages[0]) in ALONE  # all cores
                    running[pool.submit(run_job, job, {} if whole else place, started)] = (job, place)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moecore.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=usual_jobs(), help="stages at a time (default: the number of GPUs, else of cores, at most 4)")
    jobs = parser.parse_args().jobs
    if jobs < 1:
        parser.error(f"--jobs is {jobs}; allowed: 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stages = pending()
    if not stages:
        print("Nothing to do: everything is up to date.")
    elif left := run(stages, devices(jobs)):
        raise StageError(f"{len(left)} of {len(stages)} stages are not done: {', '.join(left[:5])}{' …' if left[5:] else ''}; the error stands above")


if __name__ == "__main__":
    try:
        main()
    except StageError as error:
        sys.exit(str(error))

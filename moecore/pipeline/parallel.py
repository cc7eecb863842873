"""``dvc repro`` with several stages at a time.

Small models leave cores idle: two processes of one thread each train them faster than one process
of two threads. With GPUs every job has one of its own, or as many as a cluster file says. Each job
is a ``dvc repro --single-item`` of a few stages that follow each other, so cache, lock file and run
cache are DVC's own; stages still share nothing but files.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from moecore.core.files import UserError
from moecore.pipeline.parallel import (
    THREAD_VARIABLES,
    add_stage_server,
    choose_places,
    default_jobs,
    job_environments,
    merge_environments,
)
from moecore.pipeline.plan import (
    HASHING,
    plan_stages,
    query_pipeline_status,
    stages_changed_by_code,
)
from moecore.pipeline.project import dvc_command

# DVC's words where two processes meet at a path
PATH_IS_BUSY = re.compile(r"is busy, it is being (?:read|written|blocked)|Unable to acquire lock")
ADVICE = ("To track the changes", "\tgit add", "To enable auto", "\tdvc config", "Use `dvc push`")
TRIES = 5
# On all cores: everything waits for the code, the data and a single teacher; `cost` measures time
EXCLUSIVE_STAGES = ("code", "prepare", "teacher", "cost", "measure@cost")
# Guided methods of a seed wait for the first two; the third looks at all models in one process
EARLY_KINDS = ("teacher", "teacher_router", "transfer")

DvcJob = tuple[str, ...]  # stages that one process runs one after the other


def next_job_stages(
    above: Mapping[str, Collection[str]], done: Collection[str], taken: Collection[str]
) -> DvcJob | None:
    """Return the stages that a free process should run now, or None where it has to wait.

    above: the direct ancestors of every stage, each after its ancestors; taken: stages that run,
    or were run. A job is a stage whose ancestors are done, and those of the same method and seed
    that need nothing but it and what is done: its trainings, or its measurements. Trainings come
    first, as they take longest, so that the measurements fill the processes evenly at the end.
    Stages that want the machine for themselves come when nothing else runs, as one job.
    """
    ready = [stage for stage in above if stage not in taken and set(above[stage]) <= set(done)]
    shared = [stage for stage in ready if not _is_exclusive(stage, above)]
    if not shared:
        return tuple(ready) if ready and set(taken) == set(done) else None
    first = [stage for stage in shared if _stage_kind(stage) in EARLY_KINDS]
    if first:
        return tuple(stage for stage in first if _stage_seed(stage) == _stage_seed(first[0]))
    chosen = shared[:1]
    work = _model_work(chosen[0])
    for stage in above if work else ():
        is_new = stage not in (*chosen, *taken) and set(above[stage]) <= {*done, *chosen}
        if is_new and _model_work(stage) == work and not _is_exclusive(stage, above):
            chosen.append(stage)
    return tuple(chosen)


def _stage_kind(stage: str) -> str:
    return stage.partition("@")[0]


def _is_exclusive(stage: str, above: Collection[str]) -> bool:
    """Return whether a stage wants the machine for itself; of several teachers none does."""
    if _stage_kind(stage) == "teacher":
        return sum(_stage_kind(other) == "teacher" for other in above) == 1
    return stage.split("-")[0] in EXCLUSIVE_STAGES or _stage_kind(stage) in EXCLUSIVE_STAGES


def _stage_seed(stage: str) -> str:
    """The last word of a stage's item: ``0`` of ``teacher@0`` and ``teacher_router@tgr-0``."""
    return stage.partition("@")[2].split("-")[-1]


def _model_work(stage: str) -> tuple[str, str, str] | None:
    """Method, seed and phase that a stage is about; None for one of no single method and seed.

    ``pretrain@vmoe-0`` trains, its phase is ""; ``routing@pretrain-vmoe-0``
    and ``measure@cost-finetune-vmoe-0`` look at what was trained.
    """
    *_, phase, method, seed = ["", "", *stage.partition("@")[2].split("-")]
    if not (method and seed.isdigit()) or _stage_kind(stage) == "transfer":
        return None
    return method, seed, phase


def query_pending_stage_graph() -> dict[str, set[str]]:
    """Return the stages that have to run, each after its ancestors, and those right above it."""
    pipeline = query_pipeline_status()
    stages = [item.stage for item in plan_stages(pipeline, {}, stages_changed_by_code(pipeline))]
    if stages == [HASHING]:  # it always would; no stage's code was edited
        return {}
    return {
        stage: {before for before, after in pipeline.edges if after == stage and before in stages}
        for stage in stages
    }


def dvc_target(stage: str) -> str:
    """Return how DVC calls a stage: with its file, where that is not ./dvc.yaml."""
    file = Path("steps", _stage_kind(stage), "dvc.yaml")
    return f"{file}:{stage}" if file.is_file() else stage


def run_job_stages(
    job: DvcJob, environment: Mapping[str, str], started: list[subprocess.Popen], ending: Event
) -> int:
    """Return DVC's exit code for the stages of a job; its output is passed on line by line.

    Where DVC stops only because another process is at the same path, the rest is tried again.
    ending: set before all that was ``started`` is ended; what starts after it is ended at once.
    """
    for _ in range(TRIES):
        process = subprocess.Popen(
            dvc_command("--wait-for-lock", "repro", "--single-item", *map(dvc_target, job)),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        if ending.is_set():
            process.terminate()
        is_busy = False
        for line in process.stdout or ():
            is_busy = is_busy or bool(PATH_IS_BUSY.search(line))
            if line.strip() and not line.startswith(ADVICE):
                print(line, end="", flush=True)
        if process.wait() == 0 or not is_busy or ending.is_set():
            break
    return process.returncode


def run_stages(
    above: Mapping[str, Collection[str]], environments: Sequence[Mapping[str, str]], jobs: int
) -> list[str]:
    """Run all stages in the ``environments``, ``jobs`` at a time.

    Returns those that were not finished: nothing new starts after a failure.
    """
    done: set[str] = set()
    taken: set[str] = set()
    free = list(environments)
    running: dict[Future, tuple[DvcJob, list[Mapping[str, str]]]] = {}
    started: list[subprocess.Popen] = []
    ending = Event()
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                while (
                    len(running) < jobs
                    and not failed
                    and (job := next_job_stages(above, done, taken))
                ):
                    places = choose_places(job, free)
                    if places is None:
                        break
                    taken |= set(job)
                    for place in places:
                        free.remove(place)
                    given = merge_environments(places)
                    if _is_exclusive(job[0], above):
                        given = {key: given[key] for key in given if key not in THREAD_VARIABLES}
                    running[pool.submit(run_job_stages, job, given, started, ending)] = (
                        job,
                        places,
                    )
                if not running:
                    return [stage for stage in above if stage not in done]
                finished: set[Future] = wait(running, return_when=FIRST_COMPLETED).done
                for future in finished:
                    job, places = running.pop(future)
                    free.extend(places)
                    failed = failed or future.result() != 0
                    done |= set(job) if future.result() == 0 else set()
        except BaseException:
            ending.set()
            for process in started:  # DVC ends its stages: they watch their parent
                process.terminate()
            raise


def run_pipeline(jobs: int | None = None) -> None:
    """Run the stages that have to; jobs: how many at a time, None for as many as is usual here.

    Raises UserError where some are not done; what stopped them is printed before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stages = query_pending_stage_graph()
    if not stages:
        print("Nothing to do: everything is up to date.")
        return
    jobs = jobs or default_jobs()
    unfinished = run_stages(stages, add_stage_server(job_environments(jobs)), jobs)
    if unfinished:
        named = ", ".join(unfinished[:5]) + (" …" if unfinished[5:] else "")
        undone = f"{len(unfinished)} of {len(stages)} stages are not done: {named}"
        raise UserError(f"{undone}; the error is printed above")

"""``dvc repro`` with several stages at a time.

Small models leave cores idle: two processes of one thread each train them faster than one process
of two threads. With GPUs every job has one GPU, or one per rank; jobs share a GPU if a measurement
says that this is faster, and finished trainings that they fit. Each job is a ``dvc repro
--single-item`` of a few stages in sequence, so DVC manages cache, lock file and run cache as usual;
stages share only files.

A terminal shows a redrawn table of the stages that run, else lines have a prefix. DVC's own lines
are left out. In the table a stage's progress is a row; its other lines are printed at its end,
indented ones only if it fails.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from moecore.core.files import UserError, available_cores, read_json
from moecore.pipeline import plan, project_record, stage_client
from moecore.run.history_file import HISTORY_FILE, read_lines
from moecore.run.launcher import RANKS, has_launcher, parse_fields, requested_gpus, requested_ranks
from moecore.run.run_record import GPU_MEMORY_TAG, LINE_SECONDS_ENV, format_duration
from moecore.study.stages import CODE_STAGE, STAGES, Stage

# DVC's messages if two processes use the same path
PATH_IS_BUSY = re.compile(r"is busy, it is being (?:read|written|blocked)|Unable to acquire lock")
TRIES = 5
TIMED = "measure@cost"  # measures time, so nothing else may run at the same time
USER_WRITTEN_STAGE = Stage("", "", each="measurement")  # a stage that a user wrote into dvc.yaml

DvcJob = tuple[str, ...]  # stages that one process runs in sequence
Environment = Mapping[str, str]
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
MAX_CPU_JOBS = 4  # default on a CPU
JOB_RATES_FILE = Path(".state/jobs.json")  # {GPU: {number of jobs: throughput / one job's}}
THREAD_VARIABLES = ("MOECORE_THREADS", "OMP_NUM_THREADS")  # the second: for numpy's BLAS
DVC_LINE_PATTERN = re.compile(
    r"$|> |(Updating|Generating) lock file|Stage '.*' (didn't|is cached)|Data and pipelines are"
    r"|To track the changes|\tgit add|To enable auto|\tdvc config|Use `dvc push`"
)
BEGUN_STAGE_PATTERN = re.compile(r"Running stage '(?:.*:)?(.*)'")
PROGRESS_LINE_PATTERN = re.compile(r".*: (\d+/\d+) \(\d+%\)(?:, ([\d:]+) left)?(?:, )?(.*)")


def next_job_stages(
    above: Mapping[str, Collection[str]], done: Collection[str], begun: Collection[str]
) -> DvcJob | None:
    """Return the next stages to run; above: stage → stages it needs; None if none can start."""
    # A job is a stage whose ancestors are done, and stages of the same method and seed that depend
    # only on the job and on finished stages. Trainings come first, as they take longest; the
    # measurements then fill the processes evenly. Exclusive stages form one job when nothing runs.
    runnable = [stage for stage in above if stage not in begun and set(above[stage]) <= set(done)]
    shared = [stage for stage in runnable if not _is_exclusive(stage, above)]
    if not shared:
        if runnable and set(begun) == set(done):
            return tuple(runnable)
        return None
    if first := [stage for stage in shared if _find_stage_row(stage).early]:
        seed = _seed_in_stage_name(first[0])
        return tuple(stage for stage in first if _seed_in_stage_name(stage) == seed)
    chosen = shared[:1]
    work = _method_seed_phase(chosen[0])
    if not work:
        return tuple(chosen)
    for stage in above:
        is_new = stage not in (*chosen, *begun) and set(above[stage]) <= {*done, *chosen}
        if is_new and _method_seed_phase(stage) == work and not _is_exclusive(stage, above):
            chosen.append(stage)
    return tuple(chosen)


def _stage_kind(stage: str) -> str:
    return stage.partition("@")[0]


def _find_stage_row(stage: str) -> Stage:
    return STAGES.get(_stage_kind(stage), USER_WRITTEN_STAGE)


def _is_exclusive(stage: str, above: Collection[str]) -> bool:
    """Return whether a stage must run alone; a teacher must if it is the only one in ``above``."""
    if _find_stage_row(stage).alone and _find_stage_row(stage).trains:
        return sum(_stage_kind(other) == _stage_kind(stage) for other in above) == 1
    return _find_stage_row(stage).alone or stage.split("-")[0] == TIMED


def _seed_in_stage_name(stage: str) -> str:
    """Return the seed of a stage: ``0`` for ``teacher@0`` and ``teacher_router@tgr-0``."""
    return stage.partition("@")[2].split("-")[-1]


def _method_seed_phase(stage: str) -> tuple[str, str, str] | None:
    """Return method, seed and phase of a stage; None without a single method and seed."""
    # The phase of a training (``pretrain@vmoe-0``) is "". Measurements have the model's phase:
    # ``routing@pretrain-vmoe-0``, ``measure@cost-finetune-vmoe-0``.
    *_, phase, method, seed = ["", "", *stage.partition("@")[2].split("-")]
    if not (method and seed.isdigit()) or "method" not in _find_stage_row(stage).item_names:
        return None
    return method, seed, phase


class StageDisplay:
    # seconds: expected seconds, None if unknown, of all stages that will run.

    def __init__(self, seconds: Mapping[str, float | None], jobs: int, is_verbose: bool) -> None:
        self.seconds = seconds
        self.jobs = jobs
        self.is_verbose = is_verbose
        self.is_live = sys.stdout.isatty() and not is_verbose
        self.done: set[str] = set()
        self.begun: dict[str, float] = {}  # running stage → its start on the monotonic clock
        self.progress: dict[str, tuple[str, ...]] = {}  # running stage → step, time left, values
        self.lines: dict[str, list[str]] = {}  # running stage → lines to print at its end

    def show_line(self, stage: str, line: str) -> str:
        """Display a line that DVC printed while ``stage`` ran; return the stage that now runs."""
        line = line.rstrip()
        if begun := BEGUN_STAGE_PATTERN.match(line):
            self.end_stage(stage)
            stage = begun[1]
            self.begun[stage] = time.monotonic()
            if not self.is_live and not self.is_verbose:
                print_line_with_stage(stage, "started")
        if self.is_verbose:
            print_line_with_stage("", line)
        elif begun or DVC_LINE_PATTERN.match(line):
            pass
        elif not self.is_live:
            print_line_with_stage(stage, line)
        elif progress := PROGRESS_LINE_PATTERN.fullmatch(line):
            self.progress[stage] = progress.groups("")
        else:
            self.lines.setdefault(stage, []).append(line)
        return stage

    def end_stage(self, stage: str, is_failed: bool = False) -> None:
        begun = self.begun.pop(stage, None)
        self.progress.pop(stage, None)
        for line in self.lines.pop(stage, ()):
            if is_failed or not line[:1].isspace():
                print_line_with_stage(stage, line)
        if begun is not None and not is_failed:
            self.done.add(stage)
            if not self.is_live and not self.is_verbose:
                print_line_with_stage(stage, f"done in {format_duration(time.monotonic() - begun)}")

    def table(self) -> Any:
        """Return a line per running stage, below what is done and the expected time left."""
        from rich.text import Text

        now = time.monotonic()
        running = dict(self.begun)
        remaining = 0.0
        for stage in self.seconds.keys() - self.done:
            remaining += max(0.0, (self.seconds[stage] or 0) - now + running.get(stage, now))
        title = f"{len(self.done)} of {len(self.seconds)} stages done"
        if remaining:
            title += f", about {format_duration(remaining / self.jobs)} left"
        lines = [title]
        for stage, begun in running.items():
            step, rest, values = self.progress.get(stage, ("", "", ""))
            spent = format_duration(now - begun)
            lines.append(f"{spell_stage(stage):<32} {spent:>7} {step:>11} {rest:>7}  {values}")
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


@contextmanager
def redrawing_table(display: StageDisplay) -> Iterator[None]:
    """Redraw the table below all printed lines, if the output is a terminal."""
    if not display.is_live:
        yield
        return
    from rich.live import Live

    os.environ.setdefault(LINE_SECONDS_ENV, "1")
    with Live(get_renderable=display.table, transient=True):
        yield


def spell_stage(stage: str) -> str:
    """Return a stage as words: ``explorer pretrain vmoe 0``, ``prepare pretrain``, ``compare``."""
    return re.sub("[@-]", " ", stage.removeprefix("measure@"))


def print_line_with_stage(stage: str, line: str) -> None:
    """Print ``[pretrain vmoe 0] line``; if ``line`` already begins with the title, remove that."""
    if title := spell_stage(stage):
        line = re.sub(rf"^(\w+ )?{title}: ", "", line)  # a script of several stages is named first
        line = f"[{title}] {line}"
    print(f"{line}\n", end="", flush=True)


def run_job_stages(
    job: DvcJob,
    environment: Environment,
    started: list[subprocess.Popen],
    ending: Event,
    display: StageDisplay,
) -> int:
    """Run the stages of a job and display DVC's output by line; return its exit code."""
    # If DVC stops because another process uses the same path, the job is tried again. ending: set
    # before all ``started`` processes are ended; a process that starts later is ended immediately.
    files = {stage: Path("steps", _stage_kind(stage), "dvc.yaml") for stage in job}
    targets = [f"{file}:{stage}" if file.is_file() else stage for stage, file in files.items()]
    command = project_record.dvc_command("--wait-for-lock", "repro", "--single-item", *targets)
    variables = os.environ | environment
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for _ in range(TRIES):
        process = subprocess.Popen(command, env=variables, text=True, **pipes)
        started.append(process)
        if ending.is_set():
            process.terminate()
        is_busy = False
        stage = ""
        for line in process.stdout or ():
            is_busy = is_busy or bool(PATH_IS_BUSY.search(line))
            stage = display.show_line(stage, line)
        display.end_stage(stage, is_failed=process.wait() != 0)
        if process.returncode == 0 or not is_busy or ending.is_set():
            break
    return process.returncode


def run_stages(
    above: Mapping[str, Collection[str]],
    environments: Sequence[Environment],
    jobs: int,
    display: StageDisplay,
    limit: Callable[[], int] | None = None,
) -> list[str]:
    """Run stages, ``limit`` or else ``jobs`` at a time, until one fails; return those not done."""
    # above: stage → its direct ancestors. environments: variables of each process that may run.
    # limit: returns how many of the ``jobs`` may run now.
    done: set[str] = set()
    begun: set[str] = set()
    free = list(environments)
    running: dict[Future, tuple[DvcJob, list[Environment]]] = {}
    started: list[subprocess.Popen] = []
    ending = Event()
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                display.jobs = jobs if limit is None else limit()
                while len(running) < display.jobs and not failed:
                    job = next_job_stages(above, done, begun)
                    places = choose_free_environments(job, free) if job else None
                    if job is None or places is None:
                        break
                    begun |= set(job)
                    for place in places:
                        free.remove(place)
                    environment = merge_gpus_of_environments(places)
                    if _is_exclusive(job[0], above):
                        for name in THREAD_VARIABLES:
                            environment.pop(name, None)
                    future = pool.submit(run_job_stages, job, environment, started, ending, display)
                    running[future] = job, places
                if not running:
                    return [stage for stage in above if stage not in done]
                finished: set[Future] = wait(running, return_when=FIRST_COMPLETED).done
                for future in finished:
                    job, places = running.pop(future)
                    free.extend(places)
                    if future.result() == 0:
                        done |= set(job)
                    else:
                        failed = True
                    display.done |= done
        except BaseException:
            ending.set()
            for process in started:  # DVC ends its stages: they watch their parent
                process.terminate()
            raise


def run_pipeline(jobs: int | None = None, is_verbose: bool = False) -> None:
    """Run all pending stages, ``jobs`` at a time; UserError if some are not finished."""
    # jobs: by default one per GPU, or as many as were measured to be fastest (JOB_RATES_FILE) and
    # fit; without GPUs one per core, at most 4. is_verbose: print DVC's own lines instead of a
    # table of the stages that run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pipeline = plan.query_pipeline_status()
    planned = plan.plan_stages(
        pipeline, plan.read_past_durations(), plan.stages_changed_by_code(pipeline)
    )
    stages = [item.stage for item in planned]
    if stages in ([], [CODE_STAGE]):  # it is always pending; here no stage's code was edited
        print("Nothing to do: everything is up to date.")
        return
    import torch  # takes seconds, which an idle run does not need

    above = {
        stage: {before for before, after in pipeline.edges if after == stage and before in stages}
        for stage in stages
    }
    limit = None
    gpus = 0 if has_launcher() else torch.cuda.device_count()
    if gpus:
        card, free = read_gpu_name_and_memory()
        rates = read_job_rates(card)
        choose_jobs(jobs, gpus, free, rates)
        if jobs is None:
            limit = partial(choose_jobs, None, gpus, free, rates)
            jobs = gpus * max(rates, default=1)
    jobs = jobs or torch.cuda.device_count() or min(MAX_CPU_JOBS, available_cores())
    display = StageDisplay({item.stage: item.seconds for item in planned}, jobs, is_verbose)
    environments = start_and_add_stage_server(job_environments(jobs))
    with redrawing_table(display):
        unfinished = run_stages(above, environments, jobs, display, limit)
    if unfinished:
        named = ", ".join(unfinished[:5]) + (" …" if unfinished[5:] else "")
        undone = f"{len(unfinished)} of {len(stages)} stages are not done: {named}"
        raise UserError(f"{undone}; the error is printed above")


def choose_jobs(jobs: int | None, gpus: int, free: float, rates: Mapping[int, float]) -> int:
    """Return ``jobs``, by default the fastest number that fits; UserError for too many ``jobs``."""
    # free: GB per GPU; rates: number of jobs per GPU → their throughput.
    histories = [read_lines(file.parent) for file in Path("artifacts/history").rglob(HISTORY_FILE)]
    needs = [
        (line["tags"][GPU_MEMORY_TAG], lines[0]["stage"])
        for lines in histories
        for line in lines
        if GPU_MEMORY_TAG in line.get("tags", ())
    ]
    need, stage = max(needs, default=(0.0, ""))
    if not need:
        return jobs or gpus
    fitting = max(1, int(free / need))
    if jobs is None:
        limit = min(fitting, available_cores() // gpus)
        possible = [number for number in rates if number <= limit]
        return gpus * max(possible, key=rates.__getitem__, default=1)
    if -(-jobs // gpus) > fitting:
        memory = f"{stage} took {need:.1f} GB of a GPU, and {free:.1f} GB are free"
        allowed = f"1 to {gpus * fitting}"
        raise UserError.at("--jobs", found=f"{jobs}, but {memory}", allowed=allowed)
    return jobs


def read_job_rates(card: str) -> dict[int, float]:
    """Return the throughput of each measured number of jobs per GPU; {} before a measurement."""
    rates = read_json(JOB_RATES_FILE).get(card, {}) if JOB_RATES_FILE.exists() else {}
    try:
        return {int(number): float(rate) for number, rate in rates.items()}
    except ValueError as error:
        place, allowed = f"{JOB_RATES_FILE}: {card}", '{"8": 5.1, …}, or remove the file'
        raise UserError.at(place, found=rates, allowed=allowed) from error


def read_gpu_name_and_memory() -> tuple[str, float]:
    """Return (a GPU's name, GB free on the fullest GPU), read by a process that then ends."""
    free = "min(free for free, _ in map(torch.cuda.mem_get_info, range(torch.cuda.device_count())))"
    code = f"import torch; print(torch.cuda.get_device_name(), {free}, sep='\\n')"
    name, size = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    return name, int(size) / 1e9


def job_environments(jobs: int) -> list[dict[str, str]]:
    """Return the variables of ``jobs`` processes: one GPU each, or a share of the cores."""
    # There are at least as many as a stage has ranks on GPUs. MOECORE_THREADS overrides the number
    # of threads; a launcher assigns devices itself.
    ranks = max(requested_ranks(stage) for stage in STAGES.values())
    gpus = [] if "gpus" in parse_fields() else list_gpus()
    if gpus:
        if ranks > len(gpus):
            has = f"this machine may use {len(gpus)} GPUs: {', '.join(gpus)}"
            raise UserError(f"{RANKS}: found {ranks}; {has}")
        return [{VISIBLE_GPUS: gpus[place % len(gpus)]} for place in range(max(jobs, ranks))]
    if has_launcher():
        return [{} for _ in range(jobs)]
    threads = os.environ.get(THREAD_VARIABLES[0]) or str(max(1, available_cores() // jobs))
    return [dict.fromkeys(THREAD_VARIABLES, threads) for _ in range(jobs)]


def choose_free_environments(job: DvcJob, free: Sequence[Environment]) -> list[Environment] | None:
    """Return the ``free`` environments that a job takes, one per GPU it needs; None if too few."""
    if not free:
        return None
    by_gpu = {place[VISIBLE_GPUS]: place for place in reversed(free) if VISIBLE_GPUS in place}
    if not by_gpu:
        return [free[-1]]
    count = max(1, *(requested_gpus(_find_stage_row(stage)) for stage in job))
    used = [place[VISIBLE_GPUS] for place in free]
    emptiest = sorted(by_gpu, key=lambda gpu: -used.count(gpu))  # the GPU with the most free places
    return [by_gpu[gpu] for gpu in emptiest[:count]] if len(by_gpu) >= count else None


def merge_gpus_of_environments(places: Sequence[Environment]) -> dict[str, str]:
    """Return the first of the environments ``places``, with the GPUs of all of them."""
    environment = dict(places[0])
    if VISIBLE_GPUS in environment:
        environment[VISIBLE_GPUS] = ",".join(place[VISIBLE_GPUS] for place in places)
    return environment


def list_gpus() -> list[str]:
    """Return the GPUs that this process may use, spelled as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get(VISIBLE_GPUS)
    if visible is None:
        return [str(card) for card in range(count)]
    return [card.strip() for card in visible.split(",")][:count]


def start_and_add_stage_server(environments: list[dict[str, str]]) -> list[dict[str, str]]:
    """Start the server that forks stages (Linux, no GPU); return environments that use it."""
    # First in PATH is a ``python`` that lets the server run stages; without one, this interpreter.
    import torch

    if stage_client.SOCKET_ENV in os.environ:
        return environments
    shared = {}
    commands = Path(sys.executable).parent
    if sys.platform == "linux" and not torch.cuda.device_count() and not has_launcher():
        from moecore.pipeline.stage_fork_server import start_stage_server

        server = start_stage_server()
        shared[stage_client.SOCKET_ENV] = str(server / "socket")
        commands = server / "bin"
    shared["PATH"] = os.pathsep.join([str(commands), os.environ["PATH"]])
    return [environment | shared for environment in environments]

"""Stages of several ranks, here or on other machines: words before a stage's command.

DVC stays on one host, because its locks do. What its stages start may run wherever a launcher that
runs a command in the foreground puts it, such as ``MOECORE_LAUNCH="srun --ntasks={ranks}"``. Stages
that train are ``MOECORE_RANKS`` processes. Without the two variables nothing here is used.
"""

import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from moecore.core.files import UserError
from moecore.core.operating_system import set_parent_death_signal
from moecore.core.source_layout import STAGE_MODULES
from moecore.run.stage_entry import MEETING, end_with_parent
from moecore.study.stages import STAGES, Stage, stage_of_command

LAUNCH, RANKS = "MOECORE_LAUNCH", "MOECORE_RANKS"
FORMER = "MOECORE_CLUSTER"  # named a file that is no longer read
LAUNCHED = "MOECORE_LAUNCHED"  # ranks of the stage; set for what a launcher started
LAUNCH_FIELDS = ("gpus", "ranks", "stage")
# Of SLURM's variables, what a job of its own is to know: all others tell of the job around it
KEPT_SLURM_VARIABLES = {"SLURM_CONF", "SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS"}


def is_launching() -> bool:
    """Return whether stages are started by a launcher or as several ranks."""
    return LAUNCH in os.environ or RANKS in os.environ


def requested_ranks(stage: Stage) -> int:
    """Return how many processes a stage is; raises UserError for what is no number."""
    words = os.environ.get(RANKS, "1")
    if not words.isdecimal() or int(words) < 1:
        raise UserError(f"{RANKS}: found {words!r}; allowed: a number of processes, 1 or more")
    return int(words) if stage.trains else 1


def requested_gpus(stage: Stage) -> int:
    """Return how many GPUs a stage can use: one per rank where it computes with models."""
    return requested_ranks(stage) if "seed" in stage.item else 0


def launch_fields() -> set[str]:
    """Return the names that MOECORE_LAUNCH has filled in. Raises UserError where it is wrong."""
    if FORMER in os.environ:  # unread, the stages would run on this machine
        raise UserError(f"{FORMER}: is gone; allowed: {LAUNCH} and {RANKS}, see docs/cluster.md")
    launch = os.environ.get(LAUNCH, "")
    allowed = f"a command of this machine, with {{{'}, {'.join(LAUNCH_FIELDS)}}} filled in"
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(launch) if name is not None}
        words = shlex.split(launch)
    except ValueError as error:
        raise UserError(f"{LAUNCH}: found {launch!r} ({error}); allowed: {allowed}") from None
    if fields - set(LAUNCH_FIELDS) or (words and shutil.which(words[0]) is None):
        raise UserError(f"{LAUNCH}: found {launch!r}; allowed: {allowed}")
    return fields


def launch_command(words: Sequence[str]) -> list[str]:
    """Return what starts ``python WORDS`` with the launcher.

    Where the launcher is not told how many ranks to start, ``local_ranks`` starts them.
    """
    fields = launch_fields()
    stage = STAGES[stage_of_command(words)]
    ranks = requested_ranks(stage)
    launch = os.environ.get(LAUNCH, "")
    values = {"stage": stage.name, "ranks": ranks, "gpus": requested_gpus(stage)}
    python = [sys.executable]
    if ranks > 1 and "ranks" not in fields:
        python += ["-m", "moecore.run.local_ranks", str(ranks)]
    return [*(word.format(**values) for word in shlex.split(launch)), *python, *words]


def hand_stage_to_launcher() -> None:
    """Run this stage with the launcher and exit; in what it started, say which rank it is."""
    words = sys.orig_argv[1:]
    if LAUNCHED in os.environ:
        os.environ.update(
            rank_variables_from_slurm(os.environ) | thread_variables_from_slurm(os.environ)
        )
    elif (
        words[:1] == ["-m"]
        and words[1].startswith(STAGE_MODULES)
        and words[1] != f"{STAGE_MODULES}fork_server"
        and "RANK" not in os.environ  # whoever started this rank is the launcher
    ):
        end_with_parent()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            command = launch_command(words)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(1)
        if command[1:] != words:
            sys.exit(run_launcher(command, requested_ranks(STAGES[stage_of_command(words)])))


def run_launcher(command: Sequence[str], ranks: int) -> int:
    """Return the exit code of a launcher, which ends with this process."""
    folder = Path(".state/meetings").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env=launch_environment(os.environ) | {LAUNCHED: str(ranks), MEETING: str(meeting)},
        stdin=subprocess.DEVNULL,
        preexec_fn=set_parent_death_signal,
    )
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        meeting.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a launcher is told: nothing of the job of SLURM that this process may be in,
    where ``srun`` would start a step of that job, and a rank be counted among its tasks.
    """
    is_in_job = "SLURM_JOB_ID" in environment
    told = {
        name: value
        for name, value in environment.items()
        if not (is_in_job and name.startswith(("SLURM_", "SLURMD_")))
        or name in KEPT_SLURM_VARIABLES
    }
    # srun leaves the other tasks running where one fails, unless it is told
    return {"SLURM_KILL_BAD_EXIT": "1"} | told


def rank_variables_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, from those of a SLURM task; {} where there are none, or one task."""
    size = int(environment.get("SLURM_NTASKS", "1"))
    if "RANK" in environment or "SLURM_PROCID" not in environment or size == 1:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(size // int(environment["SLURM_NNODES"])),
    }


def thread_variables_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return as many threads as the task has cores: not every cluster binds tasks to theirs."""
    cores = environment.get("SLURM_CPUS_PER_TASK")
    if cores is None or "MOECORE_THREADS" in environment:
        return {}
    return {"MOECORE_THREADS": cores, "OMP_NUM_THREADS": cores}

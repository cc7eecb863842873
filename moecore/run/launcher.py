"""Start stages with a launcher, such as ``MOECORE_LAUNCH="srun --ntasks={ranks}"``.

DVC and its locks stay on one host; the launcher runs a command in the foreground, and may run it on
other machines. A stage that trains has ``MOECORE_RANKS`` processes. Without these two variables
this module does nothing.
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

from moecore.core.files import UserError, set_parent_death_signal
from moecore.core.source_layout import STAGES_PREFIX
from moecore.run.stage_entry import MEETING_ENV, end_with_parent
from moecore.study.stages import STAGES, Stage, find_stage_of_command

LAUNCH, RANKS = "MOECORE_LAUNCH", "MOECORE_RANKS"
OLD_ENV = "MOECORE_CLUSTER"  # a variable of earlier versions: the path of a file
LAUNCHED_ENV = "MOECORE_LAUNCHED"  # number of ranks; set in processes that a launcher started
LAUNCH_FIELDS = ("gpus", "ranks", "stage")
# The variables of SLURM that a new job inherits; all others describe the surrounding job
KEPT_SLURM_VARIABLES = {"SLURM_CONF", "SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS"}


def has_launcher() -> bool:
    return LAUNCH in os.environ or RANKS in os.environ


def requested_ranks(stage: Stage) -> int:
    text = os.environ.get(RANKS, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError.at(RANKS, found=repr(text), allowed="a number of processes, 1 or more")
    return int(text) if stage.trains else 1


def requested_gpus(stage: Stage) -> int:
    """Return the number of GPUs that a stage uses: one per rank, 0 if it uses no model."""
    return requested_ranks(stage) if "seed" in stage.item_names else 0


def parse_fields() -> set[str]:
    """Return the placeholders in $MOECORE_LAUNCH; UserError if it is not a valid command."""
    if OLD_ENV in os.environ:  # if it were ignored, stages would run on this machine
        raise UserError(f"{OLD_ENV}: is gone; allowed: {LAUNCH} and {RANKS}, see docs/cluster.md")
    launch = os.environ.get(LAUNCH, "")
    allowed = f"a command of this machine, with {{{'}, {'.join(LAUNCH_FIELDS)}}} filled in"
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(launch) if name is not None}
        command = shlex.split(launch)
    except ValueError as error:
        raise UserError(f"{LAUNCH}: found {launch!r} ({error}); allowed: {allowed}") from None
    if fields - set(LAUNCH_FIELDS) or (command and shutil.which(command[0]) is None):
        raise UserError.at(LAUNCH, found=repr(launch), allowed=allowed)
    return fields


def build_launch_command(arguments: Sequence[str]) -> list[str]:
    fields = parse_fields()
    stage = STAGES[find_stage_of_command(arguments)]
    ranks = requested_ranks(stage)
    launch = os.environ.get(LAUNCH, "")
    values = {"stage": stage.name, "ranks": ranks, "gpus": requested_gpus(stage)}
    python = [sys.executable]
    if ranks > 1 and "ranks" not in fields:  # the launcher starts a single process
        python += ["-m", "moecore.run.local_ranks", str(ranks)]
    return [*(word.format(**values) for word in shlex.split(launch)), *python, *arguments]


def hand_stage_to_launcher() -> None:
    """Start this stage by the launcher and exit; in a launched process, only set rank variables."""
    arguments = sys.orig_argv[1:]
    if LAUNCHED_ENV in os.environ:
        os.environ.update(rank_env_from_slurm(os.environ))
    elif (
        arguments[:1] == ["-m"]
        and arguments[1].startswith(STAGES_PREFIX)
        and arguments[1] != f"{STAGES_PREFIX}fork_server"
        and "RANK" not in os.environ  # whoever started this rank is the launcher
    ):
        end_with_parent()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            command = build_launch_command(arguments)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(1)
        if command[1:] != arguments:
            stage = STAGES[find_stage_of_command(arguments)]
            sys.exit(run_launcher(command, requested_ranks(stage)))


def run_launcher(command: Sequence[str], ranks: int) -> int:
    folder = Path(".state/meetings").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / uuid.uuid4().hex
    env = launcher_environment(os.environ) | {LAUNCHED_ENV: str(ranks), MEETING_ENV: str(meeting)}
    begin = set_parent_death_signal
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, preexec_fn=begin)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        meeting.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    # With them, ``srun`` would start a step of that job, and a rank would count as its task.
    is_in_job = "SLURM_JOB_ID" in environment
    variables = {
        name: value
        for name, value in environment.items()
        if not (is_in_job and name.startswith(("SLURM_", "SLURMD_")))
        or name in KEPT_SLURM_VARIABLES
    }
    # By default srun leaves the other tasks running when one fails
    return {"SLURM_KILL_BAD_EXIT": "1"} | variables


def rank_env_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and thread variables, derived from SLURM's variables."""
    result = {}
    size = int(environment.get("SLURM_NTASKS", "1"))
    if size > 1 and "SLURM_PROCID" in environment and "RANK" not in environment:
        nodes = int(environment["SLURM_NNODES"])
        result = {"RANK": environment["SLURM_PROCID"], "LOCAL_RANK": environment["SLURM_LOCALID"]}
        result |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size // nodes)}
    if "SLURM_CPUS_PER_TASK" in environment and "MOECORE_THREADS" not in environment:
        names = ("MOECORE_THREADS", "OMP_NUM_THREADS")
        result |= dict.fromkeys(names, environment["SLURM_CPUS_PER_TASK"])
    return result

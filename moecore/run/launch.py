"""Stages on other machines: what a stage's command starts may run wherever a launcher puts it.

DVC stays on one host, because its locks do. ``MOECORE_CLUSTER`` names a YAML file with a launcher
that runs a command in the foreground (``srun``, or any other), and with what each stage needs.
Without the variable nothing here is used. docs/cluster.md shows a file.
"""

import ctypes
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

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.run.local_ranks import MEETING
from moecore.run.stage import PR_SET_PDEATHSIG, end_with_parent
from moecore.study.document import load
from moecore.study.params import validate_whole

CLUSTER = "MOECORE_CLUSTER"
LAUNCHED = "MOECORE_LAUNCHED"  # tasks a machine; set for what a launcher started
TRAINING = ("teacher", "pretrain", "finetune", "adversarial")
FINAL = (0, 1, 2)  # exit codes that a second try would not change: done, an error, wrong words


class Needs(Config):
    """What one stage gets, for the launcher to read."""

    nodes: int = Field(1, ge=1, description="machines")
    ranks: int = Field(1, ge=1, description="processes a machine, of a stage that trains")
    gpus: int = Field(0, ge=0, description="a machine")
    cores: int = Field(2, ge=1, description="a machine")
    memory: str = Field("8G", description="a machine, as the launcher writes it")
    time: str = Field("1:00:00", description="limit, as the launcher writes it")


class Some(Config):
    """The same; what is left out is as in ``default``."""

    nodes: int | None = Field(None, ge=1)
    ranks: int | None = Field(None, ge=1)
    gpus: int | None = Field(None, ge=0)
    cores: int | None = Field(None, ge=1)
    memory: str | None = None
    time: str | None = None


class Cluster(Config):
    """The whole file."""

    launch: str = Field(
        description="words before a stage's command; {nodes}, {ranks}, {gpus}, {cores}, {memory}, "
        "{time}, {stage} and {tasks} are filled in; with {tasks} it starts so many processes, each "
        "with SLURM_PROCID or RANK"
    )
    default: Needs = Needs()
    stages: dict[str, Some] = Field({}, description="by the stage's name in dvc.yaml")
    tries: int = Field(3, ge=1, description="starts of a stage that is preempted or out of time")

    def needs(self, stage: str) -> Needs:
        """What the stage gets; one process where it does not train."""
        own = self.stages.get(stage, Some()).model_dump(exclude_none=True)
        found = self.default.model_copy(update=own)
        if stage in TRAINING:
            return found
        return found.model_copy(update={"nodes": 1, "ranks": 1})

    @property
    def gives_gpus(self) -> bool:
        """Whether the launcher does; else ``moecore run`` gives those of this machine."""
        return "gpus" in self.fields

    @property
    def gpus(self) -> dict[str, int]:
        """How many every stage that is named wants, and ``default``."""
        named = {f"stages.{stage}": self.needs(stage).gpus for stage in self.stages}
        return {"default": self.default.gpus} | named

    @property
    def fields(self) -> set[str]:
        """The names that ``launch`` fills in."""
        return {name for _, name, _, _ in string.Formatter().parse(self.launch) if name is not None}


def read_cluster(path: str) -> Cluster:
    """The file; raises UserError with file, line and what is allowed."""
    found = validate_whole(Cluster, load(path))
    allowed = {*Needs.model_fields, "stage", "tasks"}
    if unknown := found.fields - allowed:
        listed = ", ".join(sorted(allowed))
        raise UserError(f"{path}: launch: found {{{min(unknown)}}}; allowed: {listed}")
    words = shlex.split(found.launch)
    if words and shutil.which(words[0]) is None:
        raise UserError(f"{path}: launch: found {words[0]}, which is no command here; install it")
    for stage in (*found.stages, "default"):
        needs = found.default if stage == "default" else found.needs(stage)
        if needs.nodes > 1 and "tasks" not in found.fields:
            mend = "name {tasks} in launch, as `srun --nodes={nodes} --ntasks={tasks}` does"
            raise UserError(f"{path}: {stage}.nodes: found {needs.nodes}; {mend}, or take 1")
    return found


def stage_of(words: Sequence[str]) -> str:
    """The stage's name in dvc.yaml, of the words after ``python``."""
    name = words[1].removeprefix("stages.")
    if name == "finetune" and len(words) > 2:
        return words[2]  # finetune or adversarial
    return "routing" if words[1:3] == ["stages.measure", "routing"] else name


def command(cluster: Cluster, words: Sequence[str]) -> list[str]:
    """What starts ``python WORDS`` with the launcher."""
    stage = stage_of(words)
    needs = cluster.needs(stage)
    tasks = needs.nodes * needs.ranks
    given = needs.model_dump() | {"stage": stage, "tasks": tasks}
    prefix = shlex.split(cluster.launch.format(**given))
    python = [sys.executable]
    if needs.ranks > 1 and "tasks" not in cluster.fields:
        python += ["-m", "moecore.run.local_ranks", str(needs.ranks)]
    return [*prefix, *python, *words]


def hand_over() -> None:
    """Run this process's stage with the launcher, and exit with its code; in what the launcher
    started, say which rank it is, and go on.
    """
    if LAUNCHED in os.environ:
        os.environ.update(rank_by_slurm(os.environ) | threads_by_slurm(os.environ))
        return
    words = sys.orig_argv[1:]
    if words[:1] != ["-m"] or not words[1].startswith("stages.") or words[1] == "stages.server":
        return
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        cluster = read_cluster(os.environ[CLUSTER])
    except UserError as error:
        print(f"{CLUSTER}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(run(cluster, words))


def run(cluster: Cluster, words: Sequence[str]) -> int:
    """The exit code of the stage, started again where it was ended from outside."""
    needs = cluster.needs(stage_of(words))
    code = 0
    for left in reversed(range(cluster.tries)):
        folder = Path(".state/meetings").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        meeting = folder / uuid.uuid4().hex
        shared = {LAUNCHED: str(needs.ranks), MEETING: str(meeting)}
        process = subprocess.Popen(
            command(cluster, words), env=os.environ | shared, preexec_fn=_end_with_this
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            meeting.unlink(missing_ok=True)
        code = code if code >= 0 else 128 - code
        if code in FINAL:
            break
        name = " ".join(words[1:]).removeprefix("stages.")
        again = f"it is started again, {left} more times at most" if left else "given up"
        print(f"{name}: ended from outside (exit code {code}); {again}", file=sys.stderr)
    return code


def rank_by_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, from those of a SLURM task; {} where there are none, or one task."""
    size = int(environment.get("SLURM_NTASKS", "1"))
    if "RANK" in environment or "SLURM_PROCID" not in environment or size == 1:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environment[LAUNCHED],
    }


def threads_by_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """As many threads as the task has cores, where nothing else is said: not every cluster binds
    tasks to their cores.
    """
    cores = environment.get("SLURM_CPUS_PER_TASK")
    if cores is None or "MOECORE_THREADS" in environment:
        return {}
    return {"MOECORE_THREADS": cores, "OMP_NUM_THREADS": cores}


def _end_with_this() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

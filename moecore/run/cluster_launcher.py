"""Stages on other machines: what a stage's command starts may run wherever a launcher puts it.

DVC stays on one host, because its locks do. ``MOECORE_CLUSTER`` names a YAML file with a launcher
that runs a command in the foreground (``srun``, or any other), and with what each stage needs.
Without the variable nothing here is used. docs/cluster.md shows a file.
"""

import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.operating_system import set_parent_death_signal
from moecore.core.source_layout import ROOT, STAGE_MODULES
from moecore.run.local_ranks import LAUNCHED, rank_variables_from_slurm, thread_variables_from_slurm
from moecore.run.stage_entry import MEETING, end_with_parent, has_failed_rank
from moecore.study.document import load_yaml_document
from moecore.study.settings import validate_whole

CLUSTER = "MOECORE_CLUSTER"
TRAINING_STAGES = ("teacher", "pretrain", "finetune", "adversarial")
FINAL_CODES = (0, 1, 2)  # a second try would not change these: done, an error, wrong words
# Of SLURM's variables, what a job of its own is to know: all others tell of the job around it
KEPT_SLURM_VARIABLES = {"SLURM_CONF", "SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS"}


class StageResources(Config):
    """Needs of one stage, for the launcher to read."""

    nodes: int = Field(1, ge=1, description="machines")
    ranks: int = Field(1, ge=1, description="processes a machine, of a stage that trains")
    gpus: int = Field(0, ge=0, description="a machine")
    cores: int = Field(2, ge=1, description="of each process")
    memory: str = Field("8G", description="a machine, as the launcher writes it")
    time: str = Field("1:00:00", description="limit, as the launcher writes it")


class Cluster(Config):
    """The whole file."""

    launch: str = Field(
        description="words before a stage's command; {nodes}, {ranks}, {gpus}, {cores}, {memory}, "
        "{time}, {stage} and {tasks} are filled in; with {tasks} it starts so many processes, each "
        "with SLURM_PROCID or RANK"
    )
    default: StageResources = StageResources()
    stages: dict[str, StageResources] = Field({}, description="what is other than in `default`")
    tries: int = Field(3, ge=1, description="starts of a stage that is preempted or out of time")
    steps: bool = Field(
        False, description="stages are steps of the job of SLURM that `moecore run` is in, not jobs"
    )

    def needs(self, stage: str) -> StageResources:
        """Return what the stage gets; one process where it does not train."""
        needs = self.default
        if stage in self.stages:
            needs = needs.model_copy(update=self.stages[stage].model_dump(exclude_unset=True))
        if stage in TRAINING_STAGES:
            return needs
        return needs.model_copy(update={"nodes": 1, "ranks": 1})

    @property
    def gives_gpus(self) -> bool:
        """Return whether the launcher does; else ``moecore run`` gives those of this machine."""
        return "gpus" in self.fields

    @property
    def gpus(self) -> dict[str, int]:
        """Return how many every stage that is named wants, and ``default``."""
        named = {f"stages.{stage}": self.needs(stage).gpus for stage in self.stages}
        return {"default": self.default.gpus} | named

    @property
    def fields(self) -> set[str]:
        """The names that ``launch`` fills in."""
        return {name for _, name, _, _ in string.Formatter().parse(self.launch) if name is not None}


LAUNCH_FIELDS = {*StageResources.model_fields, "stage", "tasks"}


def read_cluster(path: str) -> Cluster:
    """The file; raises UserError with file, line and what is allowed, a line for each mistake."""
    document = load_yaml_document(path)
    cluster = validate_whole(Cluster, document)
    problems = [(["launch"], _launch_problem(cluster)), *_stage_problems(cluster)]
    wrong = [
        f"{document.place(keys)}: {'.'.join(keys)}: {problem}"
        for keys, problem in problems
        if problem
    ]
    if wrong:
        raise UserError("\n".join(wrong))
    return cluster


def _launch_problem(cluster: Cluster) -> str:
    """Return what is wrong with the launcher's words; "" where nothing is."""
    try:
        words = shlex.split(cluster.launch)
        if unknown := cluster.fields - LAUNCH_FIELDS:
            return f"found {{{min(unknown)}}}; allowed: {', '.join(sorted(LAUNCH_FIELDS))}"
    except ValueError as error:
        return f"found {cluster.launch!r} ({error}); allowed: words as a shell reads them"
    if not words or shutil.which(words[0]) is None:
        return f"found {cluster.launch}; allowed: a command of this machine, such as env"
    return ""


def _stage_problems(cluster: Cluster) -> Iterator[tuple[list[str], str]]:
    """Yield the keys of what is wrong with the stages' needs, and why."""
    known = list_stage_names()
    for stage, own in cluster.stages.items():
        if stage not in known:
            yield ["stages", stage], f"no stage; allowed: {', '.join(known)}"
        elif stage not in TRAINING_STAGES and max(own.nodes, own.ranks) > 1:
            key = "nodes" if own.nodes > 1 else "ranks"
            why = f"as it does not train ({', '.join(TRAINING_STAGES)} do)"
            yield ["stages", stage, key], f"found {getattr(own, key)}; allowed: 1, {why}"
    named = {("stages", stage): cluster.needs(stage) for stage in cluster.stages}
    for keys, needs in {("default",): cluster.default, **named}.items():
        if needs.nodes > 1 and "tasks" not in cluster.fields:
            mend = "name {tasks} in launch, as `srun --nodes={nodes} --ntasks={tasks}` does"
            yield [*keys, "nodes"], f"found {needs.nodes}; {mend}, or take 1"
        if 0 < needs.gpus < needs.ranks:
            own_gpus = f"found {needs.gpus} for {needs.ranks} ranks"
            yield [*keys, "gpus"], f"{own_gpus}; allowed: one a rank, or 0"


def list_stage_names() -> list[str]:
    """The stages' names: of their scripts, and of those that are a part of one."""
    scripts = {path.stem for path in (ROOT / "moecore/stages").glob("[a-z]*.py")}
    return sorted({*scripts, "adversarial", "routing"} - {"fork_server"})


def stage_name(words: Sequence[str]) -> str:
    """The stage's name in dvc.yaml, of the words after ``python``."""
    name = words[1].removeprefix(STAGE_MODULES)
    if name == "finetune" and len(words) > 2:
        return words[2]  # finetune or adversarial
    if words[1:3] == [f"{STAGE_MODULES}measure", "routing"]:
        return "routing"
    return name


def launch_command(cluster: Cluster, words: Sequence[str]) -> list[str]:
    """Return what starts ``python WORDS`` with the launcher."""
    stage = stage_name(words)
    needs = cluster.needs(stage)
    tasks = needs.nodes * needs.ranks
    values = needs.model_dump() | {"stage": stage, "tasks": tasks}
    prefix = shlex.split(cluster.launch.format(**values))
    python = [sys.executable]
    if needs.ranks > 1 and "tasks" not in cluster.fields:
        python += ["-m", "moecore.run.local_ranks", str(needs.ranks)]
    return [*prefix, *python, *words]


def hand_stage_to_launcher() -> None:
    """Run this stage with the launcher and exit; in what it started, say which rank it is."""
    if LAUNCHED in os.environ:
        os.environ.update(
            rank_variables_from_slurm(os.environ) | thread_variables_from_slurm(os.environ)
        )
        return
    words = sys.orig_argv[1:]
    if (
        words[:1] != ["-m"]
        or not words[1].startswith(STAGE_MODULES)
        or words[1] == f"{STAGE_MODULES}fork_server"
    ):
        return
    if "RANK" in os.environ:  # whoever started this rank is the launcher
        return
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        cluster = read_cluster(os.environ[CLUSTER])
    except UserError as error:
        print(f"{CLUSTER}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(run_with_launcher(cluster, words))


def run_with_launcher(cluster: Cluster, words: Sequence[str]) -> int:
    """The exit code of the stage, started again where it was ended from outside."""
    needs = cluster.needs(stage_name(words))
    code = 0
    for left in reversed(range(cluster.tries)):
        folder = Path(".state/meetings").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        meeting = folder / uuid.uuid4().hex
        process = subprocess.Popen(
            launch_command(cluster, words),
            env=launch_environment(cluster, needs, meeting),
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
            failed = has_failed_rank(meeting)
            for left_over in folder.glob(f"{meeting.name}*"):
                left_over.unlink()
        if code < 0:
            code = 128 - code
        if failed and code:  # not the code of those that ended because one had failed
            code = 1
        if code in FINAL_CODES:
            break
        again = f"it is started again, {left} more times at most" if left else "given up"
        reason = f"ended from outside (exit code {code}); {again}"
        print(f"{' '.join(words[1:]).removeprefix(STAGE_MODULES)}: {reason}", file=sys.stderr)
    return code


def launch_environment(cluster: Cluster, needs: StageResources, meeting: Path) -> dict[str, str]:
    """Return what a launched process is told: where its ranks meet, and nothing of the job of SLURM
    that this process may be in, where `srun` would start a step of that job, and a rank be counted
    among its tasks.
    """
    environment = dict(os.environ)
    if "SLURM_JOB_ID" in environment and not cluster.steps:
        for name in environment.keys() - KEPT_SLURM_VARIABLES:
            if name.startswith(("SLURM_", "SLURMD_")):
                del environment[name]
    # srun leaves the other tasks running where one fails, unless it is told
    environment.setdefault("SLURM_KILL_BAD_EXIT", "1")
    return environment | {LAUNCHED: str(needs.ranks), MEETING: str(meeting)}

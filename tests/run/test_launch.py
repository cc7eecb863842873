"""Stages handed to a launcher: what cluster.yaml may say, what is started, and a real SLURM.
``MOECORE_SLURM`` names a folder into which Debian's slurmctld, slurmd, slurm-client,
slurm-wlm-basic-plugins and libhwloc15 were unpacked (``dpkg -x``), as .ci/run does; nothing is
installed. Two virtual nodes of this machine are started, with authentication off.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from moecore.core.files import UserError
from moecore.core.safetensors_files import read_tensors
from moecore.pipeline import parallel
from moecore.run.cluster_launcher import (
    Cluster,
    StageResources,
    launch_command,
    launch_environment,
    read_cluster,
    run_with_launcher,
    stage_name,
)
from moecore.run.local_ranks import rank_variables_from_slurm, thread_variables_from_slurm
from tests.project import COMMAND, PARAMS, Project

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
SlurmdUser=root
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=4
PartitionName=test Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> str:
    """Why there is no SLURM here; "" where there is one."""
    folder = os.environ.get("MOECORE_SLURM", "")
    if not folder:
        return "MOECORE_SLURM names no folder with Debian's SLURM packages unpacked"
    if not Path(folder, "usr/sbin/slurmctld-wlm").exists():
        return f"{folder}: no usr/sbin/slurmctld-wlm in it"
    if os.getuid():
        return "SLURM's daemons are started as root here"
    return ""


@contextmanager
def two_nodes() -> Iterator[dict[str, str]]:
    """Start it; the environment in which ``srun`` reaches it."""
    root = Path(os.environ["MOECORE_SLURM"]).resolve()
    library = root / f"usr/lib/{platform.machine()}-linux-gnu"
    plugins = library / "slurm-wlm"
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "state").mkdir()
    ports = [free_port() for _ in range(3)]
    host = socket.gethostname().split(".")[0]
    settings = {"host": host, "plugins": plugins, "folder": folder, "port": ports[0]}
    text = CONFIG.replace("[{first}-{second}]", f"[{ports[1]},{ports[2]}]").format(**settings)
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": os.pathsep.join([str(plugins), str(library)]),
        "PATH": os.pathsep.join([str(root / "usr/bin"), os.environ["PATH"]]),
    }
    step = root / "usr/sbin/slurmstepd-wlm"
    daemons = [[root / "usr/sbin/slurmctld-wlm", "-D", "-c"]]
    node = [root / "usr/sbin/slurmd-wlm", "-D", "-d", step, "-N"]
    daemons += [[*node, name] for name in ("n1", "n2")]
    running = [
        subprocess.Popen(
            list(map(str, words)),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in daemons
    ]
    try:
        wait_for_nodes(environment, folder)
        yield environment
    finally:
        for process in running:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    """Until both nodes are idle."""
    until = time.monotonic() + 60
    said = ""
    while time.monotonic() < until:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %t"], env=environment, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        if said.split() == ["n1", "idle", "n2", "idle"]:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"SLURM did not start: {said}\n{logs}")


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


PYTHON = sys.executable
BEFORE = ("code", "prepare pretrain", "teacher 0", "teacher_router vmoe 0")
SRUN = (
    "srun --nodes={nodes} --ntasks={tasks} --cpus-per-task={cores} --time={time} --job-name={stage}"
)


def written(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default: {}\n", "cluster.yaml:1:1: launch: missing"),
        ("launch: env\nnodes: 2\n", "cluster.yaml:2:1: nodes: unknown key"),
        ("launch: env\ndefault: {nodes: 0}\n", "cluster.yaml:2:11: default.nodes"),
        ("launch: env\nstages:\n  pretrain: {gpu: 1}\n", "cluster.yaml:3:14: stages.pretrain.gpu"),
        ("launch: env {cpus}\n", "launch: found {cpus}; allowed: cores, gpus"),
        ("launch: no-such-launcher\n", "cluster.yaml:1:1: launch: found no-such-launcher"),
        ("launch: env 'A=b\n", 'cluster.yaml:1:1: launch: found "env \'A=b"'),
        ("launch: env\nstages: {pretrian: {}}\n", "cluster.yaml:2:10: stages.pretrian: no stage"),
        ("launch: env\nstages: {prepare: {ranks: 4}}\n", ": stages.prepare.ranks: found 4"),
        ("launch: env\nstages: {pretrain: {ranks: 4, gpus: 2}}\n", ": stages.pretrain.gpus: "),
        ("launch: env\nstages: {pretrain: {nodes: 2}}\n", "pretrain.nodes: found 2"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, said):
    with pytest.raises(UserError) as error:
        read_cluster(written(tmp_path, text))
    assert said in str(error.value)


def test_a_job_of_its_own_knows_nothing_of_the_job_around_it(monkeypatch):
    around = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "n1",
    }
    for name, value in (around | {"SLURM_CONF": "/c", "SLURM_ACCOUNT": "lab"}).items():
        monkeypatch.setenv(name, value)
    given = launch_environment(Cluster(launch="srun"), StageResources(), Path("/m"))
    kept = {name: value for name, value in given.items() if name.startswith("SLURM")}
    assert kept == {"SLURM_CONF": "/c", "SLURM_ACCOUNT": "lab", "SLURM_KILL_BAD_EXIT": "1"}
    given = launch_environment(
        Cluster(launch="srun", steps=True), StageResources(ranks=2), Path("/m")
    )
    assert around.items() <= given.items()
    assert (given["MOECORE_LAUNCHED"], given["MOECORE_MEETING"]) == ("2", "/m")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert (
        launch_environment(Cluster(launch="srun"), StageResources(), Path("/m"))["SLURM_NTASKS"]
        == "4"
    )


def test_this_machines_own_launcher_inside_a_job(tmp_path, monkeypatch):
    """`launch: env` in a job of four tasks: one process where a stage does not train, two ranks as
    the file says where it does.
    """
    small = PARAMS.replace("[dense, vmoe, tgr]", "[vmoe]")
    project = Project(tmp_path, small)
    for stage in BEFORE:
        project.stage(*stage.split())
    monkeypatch.setattr(Project, "forked", False)
    text = "launch: env\nstages: {pretrain: {ranks: 2}}\n"
    around = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    project.given = around | {"MOECORE_CLUSTER": written(tmp_path, text)}
    for stage in ("prepare pretrain", "pretrain vmoe 0"):
        words = [PYTHON, "-m", *f"moecore.stages.{stage}".split()]
        done = project.attempt(words, project.given)
        assert done.returncode == 0, done.stderr
    record = project.folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    assert '"runtime.ranks": 2' in record.read_text()


def test_what_is_started():
    cluster = Cluster(
        launch="env A={stage} B={gpus}",
        default={"gpus": 1, "ranks": 2},
        stages={"pretrain": {"ranks": 4}, "routing": {"gpus": 0}},
    )
    words = ["-m", "moecore.stages.pretrain", "vmoe", "0"]
    ranks = ["-m", "moecore.run.local_ranks", "4"]
    assert launch_command(cluster, words) == ["env", "A=pretrain", "B=1", PYTHON, *ranks, *words]
    words = ["-m", "moecore.stages.measure", "routing", "pretrain", "vmoe", "0"]
    assert launch_command(cluster, words) == ["env", "A=routing", "B=0", PYTHON, *words]
    words = ["-m", "moecore.stages.finetune", "adversarial", "vmoe", "0"]
    assert stage_name(words) == "adversarial"
    assert launch_command(cluster, words)[3:6] == [PYTHON, "-m", "moecore.run.local_ranks"]
    cluster = Cluster(launch=SRUN, stages={"pretrain": {"nodes": 2, "ranks": 4, "cores": 8}})
    words = ["-m", "moecore.stages.pretrain", "vmoe", "0"]
    assert launch_command(cluster, words) == [
        *["srun", "--nodes=2", "--ntasks=8", "--cpus-per-task=8", "--time=1:00:00"],
        *["--job-name=pretrain", PYTHON, *words],
    ]


def test_a_task_of_slurm_knows_its_rank():
    task = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "MOECORE_LAUNCHED": "2"}
    assert rank_variables_from_slurm(task) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert rank_variables_from_slurm(task | {"SLURM_NTASKS": "1"}) == {}
    assert rank_variables_from_slurm(task | {"RANK": "0"}) == {}, "torchrun has said it"
    assert thread_variables_from_slurm(task) == {}
    four = {"MOECORE_THREADS": "4", "OMP_NUM_THREADS": "4"}
    assert thread_variables_from_slurm(task | {"SLURM_CPUS_PER_TASK": "4"}) == four
    assert thread_variables_from_slurm({"SLURM_CPUS_PER_TASK": "4", "MOECORE_THREADS": "1"}) == {}


def test_only_what_is_ended_from_outside_is_started_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    marks = tmp_path / "marks"
    for code, starts, ends in ((143, 3, 143), (1, 1, 1), (0, 1, 0)):
        marks.write_text("")
        script = tmp_path / "launcher"
        script.write_text(f"#!/bin/sh\necho x >> {marks}\nexit {code}\n")
        script.chmod(0o755)
        cluster = Cluster(launch=str(script), tries=3)
        assert run_with_launcher(cluster, ["-m", "moecore.stages.pretrain", "vmoe", "0"]) == ends
        assert marks.read_text().count("x") == starts
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 3 and "started again, 2 more" in said[0] and "given up" in said[2]


def test_an_error_of_one_rank_is_not_tried_again(tmp_path, monkeypatch, capfd):
    """The others end as if from outside, and their code is the higher."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "launcher"
    script.write_text('#!/bin/sh\necho x >> marks\ntouch "$MOECORE_MEETING.failed"\nexit 143\n')
    script.chmod(0o755)
    assert (
        run_with_launcher(
            Cluster(launch=str(script), tries=3), ["-m", "moecore.stages.pretrain", "vmoe", "0"]
        )
        == 1
    )
    assert Path("marks").read_text() == "x\n"
    assert not capfd.readouterr().err and not list(Path(".state/meetings").iterdir())


def test_jobs_take_the_cards_that_were_given(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    given = [place["CUDA_VISIBLE_DEVICES"] for place in parallel.job_environments(3)]
    assert given == ["4", "5", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in parallel.job_environments(2)] == [
        "0",
        "1",
    ]


def test_a_job_takes_as_many_cards_as_its_stage_wants(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    text = "launch: env\ndefault: {gpus: 1}\nstages: {pretrain: {ranks: 2, gpus: 2}}\n"
    monkeypatch.setenv("MOECORE_CLUSTER", written(tmp_path, text))
    training = ("pretrain@vmoe-0", "finetune@vmoe-0")
    all_places = parallel.job_environments(3)
    chosen = parallel.choose_places(training, all_places)
    assert parallel.merge_environments(chosen) == {"CUDA_VISIBLE_DEVICES": "7,5"}
    left = [place for place in all_places if place not in chosen]
    assert parallel.choose_places(training, left) is None, "it waits for a second one"
    assert parallel.choose_places(("compare",), left) == left
    assert len(parallel.job_environments(1)) == 2, "one job at a time has both"
    path = written(tmp_path, text.replace("gpus: 2", "gpus: 4"))
    with pytest.raises(UserError) as caught:
        parallel.job_environments(3)
    said = f"{path}: stages.pretrain.gpus: found 4; this machine may use 3: 2, 5, 7"
    assert str(caught.value) == said
    written(tmp_path, "launch: 'env GPUS={gpus}'\ndefault: {gpus: 4}\n")
    assert parallel.job_environments(64) == [{}] * 64, "the launcher gives them"


@pytest.fixture(scope="module")
def nodes():
    if why := missing():
        pytest.skip(why)
    with two_nodes() as environment:
        yield {name: environment[name] for name in ("SLURM_CONF", "LD_LIBRARY_PATH", "PATH")}


@pytest.fixture(scope="module")
def project(tmp_path_factory, nodes):
    """A project whose pipeline ran over two nodes."""
    small = PARAMS.replace("[dense, vmoe, tgr]", "[vmoe]").replace(
        "measurements: [invariance, lipschitz, cost]",
        "measurements: [cost]",
    )
    folder = tmp_path_factory.mktemp("cluster")
    found = Project(folder, small.replace("  {epochs: 2, batch: 64,", FP32)).with_dvc()
    found.forked = False
    text = f'launch: "{SRUN}"\ndefault: {{cores: 1}}\nstages: {{pretrain: {{nodes: 2}}}}\n'
    own = {"MOECORE_CLUSTER": written(folder, text), "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join([str(Path(PYTHON).parent), nodes["PATH"]])
    found.given = nodes | own | {"PATH": path}
    found.run([PYTHON, "-c", COMMAND, "run", "--jobs", "3"], found.given)
    return found


FP32 = "  {precision: float32, epochs: 2, batch: 64,"


def queue(environment: dict[str, str]) -> list[str]:
    """Names of the jobs that SLURM has."""
    done = subprocess.run(
        ["squeue", "-h", "-o", "%j"], env=os.environ | environment, capture_output=True, text=True
    )
    return done.stdout.split()


def test_the_pipeline_over_two_nodes(project):
    assert (project.folder / "reports/index.html").is_file()
    record = project.folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    tags = [json.loads(line).get("tags", {}) for line in record.read_text().splitlines()]
    assert {"runtime.ranks": 2} in tags, "trained by two ranks, one a node"
    shared = read_tensors(project.folder / "artifacts/pretrain/vmoe/0/model.safetensors")[0]
    again = project.run([PYTHON, "-c", COMMAND, "run"], project.given)
    assert "Nothing to do" in again.stdout
    project.stage("pretrain", "vmoe", "0")
    alone = read_tensors(project.folder / "artifacts/pretrain/vmoe/0/model.safetensors")[0]
    assert all((shared[name] - alone[name]).abs().max() < 1e-4 for name in alone)


def test_a_failing_stage_and_a_killed_driver_leave_no_job(project):
    project.edit(FP32, FP32.replace("epochs: 2", "epochs: 3"))
    data = project.folder / "artifacts/data/pretrain"
    data.rename(project.folder / "away")
    words = [PYTHON, "-m", "moecore.stages.pretrain", "vmoe", "0"]
    done = project.attempt(words, project.given)
    own = ("srun:", "slurmstepd")  # SLURM's words, that it ends the other task
    said = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    missing = (
        "artifacts/data/pretrain/card.json: no such file; the stage that writes it has not run"
    )
    assert (done.returncode, said) == (1, [f"pretrain vmoe 0: {missing}"]), "one line, of one rank"
    waited(lambda: queue(project.given) == [])  # an ended job is listed for a moment
    (project.folder / "away").rename(data)
    environment = project.environment | project.given

    def start(words: list[str]) -> subprocess.Popen:
        return subprocess.Popen(
            words, cwd=project.folder, env=environment, stdout=PIPE, stderr=PIPE, text=True
        )

    stage = start(words)
    waited(lambda: list(project.folder.glob(".state/pretrain/vmoe/0/*/checkpoint.safetensors")))
    assert queue(project.given) == ["pretrain"]
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    waited(lambda: queue(project.given) == [])
    # The whole driver, in a job of its own
    driver = start([PYTHON, "-c", COMMAND, "run", "--jobs", "2"])
    waited(lambda: "pretrain" in queue(project.given))
    driver.kill()
    driver.wait()
    waited(lambda: queue(project.given) == [])
    # Preempted: SLURM ends it, and it is started again and goes on.
    stage = start(words)
    waited(lambda: queue(project.given) == ["pretrain"])
    subprocess.run(["scancel", "--name=pretrain"], env=environment, check=True)
    _, said = stage.communicate()
    assert stage.returncode == 0, said
    assert "ended from outside" in said and "started again, 2 more times" in said


def waited(holds, seconds: float = 90.0) -> None:
    """Until ``holds()``."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)

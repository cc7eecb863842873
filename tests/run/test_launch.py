"""Stages handed to a launcher: what is started, and a real SLURM."""

# ``MOECORE_SLURM`` names a folder into which Debian's slurmctld, slurmd, slurm-client,
# slurm-wlm-basic-plugins and libhwloc15 were unpacked (``dpkg -x``), as .ci/run does; nothing is
# installed. Two virtual nodes of this machine are started, with authentication off.

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

import pytest

from moecore.core.files import UserError
from moecore.core.safetensors_files import read_tensors
from moecore.pipeline import parallel
from moecore.run import launcher
from moecore.run.launcher import build_launch_command, launcher_environment, rank_env_from_slurm
from tests.project import PARAMS, Project

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
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(plugins), str(library)])
    environment["PATH"] = os.pathsep.join([str(root / "usr/bin"), os.environ["PATH"]])
    step = root / "usr/sbin/slurmstepd-wlm"
    daemons = [[root / "usr/sbin/slurmctld-wlm", "-D", "-c"]]
    node = [root / "usr/sbin/slurmd-wlm", "-D", "-d", step, "-N"]
    daemons += [[*node, name] for name in ("n1", "n2")]
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    running = [subprocess.Popen([*map(str, words)], env=environment, **quiet) for words in daemons]
    try:
        wait_for_nodes(environment, folder)
        yield environment
    finally:
        for process in running:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    until = time.monotonic() + 60
    said = ""
    while time.monotonic() < until:
        command = ["sinfo", "-h", "-N", "-o", "%N %t"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if said.split() == ["n1", "idle", "n2", "idle"]:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"SLURM did not start: {said}\n{logs}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


PYTHON = sys.executable
PRETRAIN = ["-m", "moecore.stages.pretrain", "vmoe", "0"]
LAUNCH = "srun --nodes={ranks} --ntasks={ranks} --cpus-per-task=1 --job-name={stage}"
FP32 = "  {precision: float32, epochs: 2, batch: 64,"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LAUNCH", "env {cpus}", "found 'env {cpus}'; allowed: a command of this machine, with"),
        ("LAUNCH", "env {", "found 'env {' ("),
        ("LAUNCH", "env 'A=b", 'found "env \'A=b" (No closing quotation)'),
        ("LAUNCH", "no-such-launcher", "found 'no-such-launcher'; allowed: a command of this"),
        ("CLUSTER", "cluster.yaml", "is gone; allowed: MOECORE_LAUNCH and MOECORE_RANKS, see docs"),
        ("RANKS", "two", "found 'two'; allowed: a number of processes, 1 or more"),
        ("RANKS", "0", "found '0'; allowed: a number of processes, 1 or more"),
    ],
)
def test_wrong_words_are_refused(monkeypatch, name, value, said):
    monkeypatch.setenv(f"MOECORE_{name}", value)
    for refusing in (lambda: build_launch_command(PRETRAIN), lambda: parallel.job_environments(2)):
        with pytest.raises(UserError) as error:
            refusing()
        assert f"MOECORE_{name}: {said}" in str(error.value)


def test_a_job_of_its_own_knows_nothing_of_the_job_around_it_and_a_task_its_rank():
    around = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"}
    kept = {"SLURM_CONF": "/c", "SLURM_ACCOUNT": "lab", "HOME": "/h"}
    kill = {"SLURM_KILL_BAD_EXIT": "1"}
    assert launcher_environment(around | kept | {"SLURM_JOB_ID": "7"}) == kept | kill
    assert launcher_environment(around | kept) == around | kept | kill
    task = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert rank_env_from_slurm(task) == ranks
    assert rank_env_from_slurm(task | {"SLURM_NTASKS": "1"}) == {}
    assert rank_env_from_slurm(task | {"RANK": "0"}) == {}, "torchrun has said it"
    four = {"MOECORE_THREADS": "4", "OMP_NUM_THREADS": "4"}
    assert rank_env_from_slurm({"SLURM_CPUS_PER_TASK": "4"}) == four
    assert rank_env_from_slurm({"SLURM_CPUS_PER_TASK": "4", "MOECORE_THREADS": "1"}) == {}


def test_what_is_started(monkeypatch):
    monkeypatch.setenv("MOECORE_RANKS", "4")
    ranks = ["-m", "moecore.run.local_ranks", "4"]
    assert build_launch_command(PRETRAIN) == [PYTHON, *ranks, *PRETRAIN]
    routing = ["-m", "moecore.stages.measure", "routing", "pretrain", "vmoe", "0"]
    assert build_launch_command(routing) == [PYTHON, *routing]
    monkeypatch.setenv("MOECORE_LAUNCH", "env A={stage} B={gpus}")
    assert build_launch_command(PRETRAIN) == ["env", "A=pretrain", "B=4", PYTHON, *ranks, *PRETRAIN]
    assert build_launch_command(routing) == ["env", "A=routing", "B=1", PYTHON, *routing]
    compare = ["-m", "moecore.stages.compare"]
    assert build_launch_command(compare) == ["env", "A=compare", "B=0", PYTHON, *compare]
    adversarial = ["-m", "moecore.stages.finetune", "adversarial", "vmoe", "0"]
    assert build_launch_command(adversarial)[:2] == ["env", "A=adversarial"]
    monkeypatch.setenv("MOECORE_LAUNCH", "env A={ranks}")
    assert build_launch_command(PRETRAIN) == ["env", "A=4", PYTHON, *PRETRAIN]


def test_the_exit_code_is_the_launchers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script, code in (("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)):
        words = ["sh", "-c", f'touch "$MOECORE_MEETING"; {script}']
        assert launcher.run_launcher(words, 2) == code and not list(
            Path(".state/meetings").iterdir()
        )


def test_jobs_take_the_cards_that_were_given_one_per_rank(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    given = [place["CUDA_VISIBLE_DEVICES"] for place in parallel.job_environments(3)]
    assert given == ["4", "5", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    places = parallel.job_environments(2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    monkeypatch.setenv("MOECORE_RANKS", "2")
    all_places = parallel.job_environments(3)
    chosen = parallel.choose_free_environments(("pretrain@vmoe-0", "finetune@vmoe-0"), all_places)
    assert parallel.merge_gpus_of_environments(chosen) == {"CUDA_VISIBLE_DEVICES": "7,5"}
    left = [place for place in all_places if place not in chosen]
    assert parallel.choose_free_environments(("pretrain@tgr-0",), left) is None, "it needs two"
    assert parallel.choose_free_environments(("compare",), left) == left
    shared = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "1", "1", "0", "1")]
    fewest_jobs = [{"CUDA_VISIBLE_DEVICES": "1"}]  # three places are free on it, two on the other
    assert parallel.choose_free_environments(("compare",), shared) == fewest_jobs
    assert parallel.choose_free_environments(("compare",), shared[:1] + shared[3:]) == shared[:1]
    assert len(parallel.job_environments(1)) == 2, "one job at a time has both"
    monkeypatch.setenv("MOECORE_RANKS", "4")
    with pytest.raises(UserError) as caught:
        parallel.job_environments(3)
    assert str(caught.value) == "MOECORE_RANKS: found 4; this machine may use 3 GPUs: 2, 5, 7"
    monkeypatch.setenv("MOECORE_LAUNCH", "env GPUS={gpus}")
    assert parallel.job_environments(64) == [{}] * 64, "the launcher gives them"


def test_jobs_share_a_card_by_what_a_training_took_of_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel, "available_cores", lambda: 6)
    rates = {1: 1.0, 2: 1.9, 4: 3.1, 5: 2.5}  # throughput
    assert parallel.choose_jobs(None, 2, 80.0, rates) == 2, "their memory is not known"
    history = Path("artifacts/history/pretrain/vmoe/0/history.jsonl")
    history.parent.mkdir(parents=True)
    header = {"stage": "pretrain"} | dict.fromkeys(("dvc_stage", "phase", "method", "seed"))
    header |= {"t": 0, "uid": "0", "params": {}, "host": "", "pid": 1}
    lines = [header, {"t": 1, "tags": {"runtime.card_gb": 9.5}}]
    history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # 3 cores per card; 20 GB take two trainings
    assert [parallel.choose_jobs(None, 2, free, rates) for free in (80.0, 20.0, 9.0)] == [4, 4, 2]
    assert parallel.choose_jobs(None, 1, 80.0, rates) == 4  # the fastest of those
    assert parallel.choose_jobs(None, 2, 80.0, {}) == 2, "one each until a card was measured"
    assert parallel.choose_jobs(8, 1, 80.0, {}) == 8
    found = "found 8, but pretrain took 9.5 GB of a GPU, and 40.0 GB are free; allowed: 1 to 4"
    with pytest.raises(UserError, match=f"--jobs: {found}"):
        parallel.choose_jobs(8, 1, 40.0, {})
    assert parallel.read_job_rates("H200") == {}
    parallel.JOB_RATES_FILE.parent.mkdir()
    parallel.JOB_RATES_FILE.write_text(json.dumps({"H200": {"8": 5.1}, "T4": {"8": "fast"}}))
    assert parallel.read_job_rates("H200") == {8: 5.1}
    with pytest.raises(UserError, match="jobs.json: T4: found {'8': 'fast'}; allowed: "):
        parallel.read_job_rates("T4")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose data are prepared, with a pretraining that can be ended on its way."""
    small = PARAMS.replace("[dense, vmoe, tgr]", "[vmoe]")
    found = Project(tmp_path_factory.mktemp("r"), small.replace("  {epochs: 2, batch: 64,", FP32))
    for stage in ("prepare pretrain", "teacher 0", "teacher_router vmoe 0"):
        found.stage(*stage.split())
    found.forked = False
    return found


def weights(project: Project) -> dict:
    return read_tensors(project.folder / "artifacts/pretrain/vmoe/0/model.safetensors")[0]


def count_ranks(project: Project) -> list[int]:
    record = project.folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    lines = map(json.loads, record.read_text().splitlines())
    return [row["tags"]["runtime.ranks"] for row in lines if "runtime.ranks" in row.get("tags", {})]


def test_ranks_of_this_machine_inside_a_job(project):
    """In a job of four tasks: one process where a stage does not train, two ranks where it does."""
    around = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    project.given = around | {"MOECORE_RANKS": "2"}
    for stage in ("prepare pretrain", "pretrain vmoe 0"):
        done = project.attempt([PYTHON, "-m", *f"moecore.stages.{stage}".split()], project.given)
        assert done.returncode == 0, done.stderr
    assert count_ranks(project) == [2]


def test_srun_starts_ranks_on_two_nodes(project):
    """It fails once, is killed and leaves no job, resumes, and ends with the same bits."""
    if why := missing():
        pytest.skip(why)
    with two_nodes() as environment:
        project.given = {name: environment[name] for name in ("SLURM_CONF", "LD_LIBRARY_PATH")}
        path = os.pathsep.join([str(Path(PYTHON).parent), environment["PATH"]])
        project.given |= {"PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
        project.given |= {"MOECORE_LAUNCH": LAUNCH, "MOECORE_RANKS": "2"}
        done = project.attempt([PYTHON, *PRETRAIN], project.given)
        assert done.returncode == 0, done.stderr
        assert count_ranks(project) == [2]
        whole = weights(project)
        data = project.folder / "artifacts/data/pretrain"
        data.rename(project.folder / "away")
        done = project.attempt([PYTHON, *PRETRAIN], project.given)
        own = ("srun:", "slurmstepd")  # SLURM's words, that it ends the other task
        said = [line for line in done.stderr.splitlines() if not line.startswith(own)]
        lacking = "artifacts/data/pretrain/card.json: no such file; the stage that writes it"
        assert done.returncode and len(said) == 1, "one line, of one rank"
        assert said[0].startswith(f"pretrain vmoe 0: {lacking}")
        (project.folder / "away").rename(data)
        around = project.environment | project.given
        stage = subprocess.Popen([PYTHON, *PRETRAIN], cwd=project.folder, env=around)
        kept = ".state/pretrain/vmoe/0/*/checkpoint.safetensors"
        wait_until(lambda: list(project.folder.glob(kept)))
        assert queue(environment) == ["pretrain"]
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        wait_until(lambda: queue(environment) == [])
        done = project.attempt([PYTHON, *PRETRAIN], project.given)
        assert done.returncode == 0, done.stderr
        assert all((whole[name] == value).all() for name, value in weights(project).items())


def queue(environment: dict[str, str]) -> list[str]:
    command = ["squeue", "-h", "-o", "%j"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.split()


def wait_until(holds, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)

"""Several stages at a time: free processes, DVC, and stages forked from a server."""

import os
import platform
import re
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from moecore.core.files import UserError, atomic_folder, write_json
from moecore.pipeline import parallel, stage_client
from moecore.pipeline.parallel import next_job_stages, run_job_stages, run_stages
from moecore.pipeline.plan import query_pipeline_status
from moecore.pipeline.stage_client import SOCKET_ENV
from moecore.pipeline.stage_fork_server import start_stage_server
from moecore.run.history_file import read_dvc_locks
from tests import forked
from tests.project import COMMAND, ROOT, Project

ABOVE = {
    "code": set(),
    "prepare@pretrain": {"code"},
    "teacher@0": {"prepare@pretrain"},
    "teacher_router@vmoe-0": {"teacher@0"},
    "teacher_router@prc-0": {"teacher@0"},
    "pretrain@vmoe-0": {"teacher_router@vmoe-0"},
    "pretrain@prc-0": {"teacher_router@prc-0"},
    "finetune@vmoe-0": {"pretrain@vmoe-0"},
    "calibrate@pretrain-vmoe-0": {"pretrain@vmoe-0"},
    "measure@invariance-pretrain-vmoe-0": {"pretrain@vmoe-0"},
    "measure@invariance-finetune-vmoe-0": {"finetune@vmoe-0"},
    "measure@invariance-pretrain-prc-0": {"pretrain@prc-0"},
    "transfer@pretrain-0": {"pretrain@vmoe-0", "pretrain@prc-0"},
    "compare": {
        *("measure@invariance-finetune-vmoe-0", "measure@invariance-pretrain-vmoe-0"),
        *("calibrate@pretrain-vmoe-0", "measure@invariance-pretrain-prc-0", "transfer@pretrain-0"),
    },
}
QUIET = parallel.StageDisplay({}, 1, is_verbose=False)
BEGUN = {"code", "prepare@pretrain", "teacher@0", "teacher_router@vmoe-0", "teacher_router@prc-0"}


def test_what_all_wait_for_comes_first_then_trainings_and_a_models_measurements_together():
    assert next_job_stages(ABOVE, set(), set()) == ("code",)
    assert next_job_stages(ABOVE, set(), {"code"}) is None, "nothing is ready"
    assert next_job_stages(ABOVE, {"code"}, {"code"}) == ("prepare@pretrain",)
    done = {"code", "prepare@pretrain"}
    assert next_job_stages(ABOVE, done, done) == ("teacher@0",)
    done = {*done, "teacher@0"}
    assert next_job_stages(ABOVE, done, done) == ("teacher_router@vmoe-0", "teacher_router@prc-0")
    done = set(BEGUN)
    first = next_job_stages(ABOVE, done, done)
    assert first == ("pretrain@vmoe-0", "finetune@vmoe-0")
    second = next_job_stages(ABOVE, done, done | set(first))
    assert second == ("pretrain@prc-0",)
    assert next_job_stages(ABOVE, done, done | {*first, *second}) is None
    done |= set(first)
    third = next_job_stages(ABOVE, done, done | set(second))
    assert third == ("calibrate@pretrain-vmoe-0", "measure@invariance-pretrain-vmoe-0")
    done |= {*second, *third}
    assert next_job_stages(ABOVE, done, done) == ("transfer@pretrain-0",), "one long process"
    done |= {"transfer@pretrain-0"}
    for stage in ("measure@invariance-finetune-vmoe-0", "measure@invariance-pretrain-prc-0"):
        assert next_job_stages(ABOVE, done, done) == (stage,), "of another phase or method"
        done.add(stage)
    assert next_job_stages(ABOVE, done, done) == ("compare",)


def test_teachers_of_several_seeds_are_trained_at_once_and_what_is_timed_alone_and_last():
    above = {f"teacher@{seed}": set() for seed in (0, 1)}
    for seed in (0, 1):
        for method in ("vmoe", "tgr"):
            above[f"teacher_router@{method}-{seed}"] = {f"teacher@{seed}"}
            above[f"pretrain@{method}-{seed}"] = {f"teacher_router@{method}-{seed}"}
    assert next_job_stages(above, set(), set()) == ("teacher@0",)
    assert next_job_stages(above, set(), {"teacher@0"}) == ("teacher@1",)
    teachers = {"teacher@0", "teacher@1"}
    routers = ("teacher_router@vmoe-0", "teacher_router@tgr-0")
    assert next_job_stages(above, teachers, teachers) == routers, "those of one seed"
    assert next_job_stages(above, {"teacher@0"}, teachers) == routers, "the other teacher learns"
    above = {"pretrain@a-0": set(), "measure@cost-pretrain-a-0": {"pretrain@a-0"}}
    above |= {"pretrain@b-0": set(), "measure@cost-pretrain-b-0": {"pretrain@b-0"}}
    above |= {"routing@pretrain-b-0": {"pretrain@b-0"}}
    assert next_job_stages(above, set(), set()) == ("pretrain@a-0",)
    done = {"pretrain@a-0"}
    assert next_job_stages(above, done, done) == ("pretrain@b-0",)
    both = {"pretrain@a-0", "pretrain@b-0"}
    assert next_job_stages(above, both, both) == ("routing@pretrain-b-0",)
    taken = both | {"routing@pretrain-b-0"}
    assert next_job_stages(above, both, taken) is None, "something else runs"
    timed = ("measure@cost-pretrain-a-0", "measure@cost-pretrain-b-0")
    assert next_job_stages(above, taken, taken) == timed


@pytest.fixture
def started(monkeypatch) -> list[tuple[tuple[str, ...], dict]]:
    """Return the stages and environments of jobs that a fake starts; `teacher@0` of 1 fails."""
    jobs = []

    def run_fake(job, environment, started, ending, display):
        jobs.append((job, dict(environment)))
        return int("fails" in environment and job[0] == "teacher@0")

    monkeypatch.setattr("moecore.pipeline.parallel.run_job_stages", run_fake)
    return jobs


def test_all_cores_are_for_what_runs_alone(started):
    above = ABOVE | {"measure@cost-finetune-vmoe-0": {"finetune@vmoe-0"}}
    one = {"MOECORE_THREADS": "1"}
    assert run_stages(above, [one, one], 2, QUIET) == []
    given = {stage: environment for stages, environment in started for stage in stages}
    alone = {stage for stage, environment in given.items() if not environment}
    assert alone == {*"code prepare@pretrain teacher@0 measure@cost-finetune-vmoe-0".split()}
    assert given.keys() == above.keys()


@pytest.mark.parametrize(("given", "threads"), [("3", "3"), ("", "2")])
def test_a_job_has_a_share_of_the_cores_unless_threads_are_given(monkeypatch, given, threads):
    monkeypatch.setattr(parallel, "available_cores", lambda: 4)
    monkeypatch.setattr(parallel, "list_gpus", list)
    monkeypatch.setenv("MOECORE_THREADS", given)
    job = {"MOECORE_THREADS": threads, "OMP_NUM_THREADS": threads}
    assert parallel.job_environments(2) == [job, job]


PRINTED = """\
Running stage 'pretrain@vmoe-0':
> python -m moecore.stages.pretrain vmoe 0
pretrain vmoe 0: 80/372 (22%), 0:35 left, loss 1.7
  MoE 1: dead 0
pretrain vmoe 0: a warning
Running stage 'measure@truth-pretrain-vmoe-0':
Traceback (most recent call last):
  File "truth.py"
"""


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_has_a_row_per_stage_and_a_log_a_prefix(live, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: live)
    usual = {"pretrain@vmoe-0": 9.0, "compare": 120.0}
    display = parallel.StageDisplay(usual, jobs=2, is_verbose=False)
    stage = ""
    tables = []
    for line in PRINTED.splitlines(keepends=True):
        stage = display.show_line(stage, line)
        tables.append(display.table().plain.splitlines())
    display.end_stage(stage, is_failed=True)
    *lines, head, place = capsys.readouterr().out.splitlines()
    assert head == "[truth pretrain vmoe 0] Traceback (most recent call last):"
    assert place == '[truth pretrain vmoe 0]   File "truth.py"'
    if live:
        assert lines == ["[pretrain vmoe 0] a warning"]
        assert tables[2][1].split() == "pretrain vmoe 0 0:00 80/372 0:35 loss 1.7".split()
        # 120 s in two processes are left
        assert tables[-1][0].startswith("1 of 2 stages done, about 1:00 left")
    else:
        assert lines[1] == "[pretrain vmoe 0] 80/372 (22%), 0:35 left, loss 1.7"
        assert lines[4] == "[pretrain vmoe 0] done in 0:00"


def test_nothing_starts_after_a_failure(started):
    left = run_stages(ABOVE, [{"fails": "1"}], 1, QUIET)
    assert [stages for stages, _ in started] == [("code",), ("prepare@pretrain",), ("teacher@0",)]
    assert left == [stage for stage in ABOVE if stage not in ("code", "prepare@pretrain")]


def test_with_dvc_a_failure_is_shown_and_the_rest_goes_on_later(copied):
    """The finished project of the tests was made two stages at a time; see conftest.py."""
    rate = "finetune: {epochs: 2, batch: 32, learning_rate: 0.001,"
    endless = rate.replace("0.001", "1.0e+38, clip: null")  # what no check can know
    copied.edit(rate, endless)
    failed = copied.moecore("run", "--jobs", "2")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "stages are not done: finetune@dense-0" in failed.stderr
    assert "\n[finetune dense 0] the loss is not finite since step" in failed.stdout
    assert "Updating lock" not in failed.stdout
    copied.edit(endless, rate)
    done = copied.moecore("run", "--jobs", "2")
    ran = re.findall(r"\[(.*)\] started", done.stdout)
    assert ran == ["code"], "all else comes back from the cache"
    assert copied.changed_by_dvc() == set()


def test_what_can_be_known_stops_before_the_first_stage(copied):
    """`moecore run` starts nothing; a plain `dvc repro` fails in its first stage; both say why."""
    copied.edit("shots: 20", "shots: 5000")
    said = ": finetune.shots: found 5000, but class 8 of data.finetune has 125 training images"
    run = copied.moecore("run", "--jobs", "2")
    assert run.returncode == 1 and said in run.stderr and "started" not in run.stdout
    repro = copied.attempt(["dvc", "repro"])
    assert repro.returncode != 0 and said in repro.stdout + repro.stderr
    started = [line for line in repro.stdout.splitlines() if line.startswith("Running stage")]
    assert started == ["Running stage 'code':"]


def test_every_stage_of_the_pipeline_is_served():
    from moecore.stages import fork_server as stages_server  # imports what stages need

    scripts = {path.stem for path in (ROOT / "stages").glob("[a-z]*.py")}
    assert stages_server.STAGES.keys() == scripts - {"fork_server"}
    assert all(name == stage.__name__ for name, stage in stages_server.STAGES.items())


def write_server(folder: Path, monkeypatch, code: str) -> str:
    """Return a module of ``folder`` that is started as a server of stages."""
    (folder / "imitated_server.py").write_text(f"import os, sys, time\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "imitated_server"


def test_a_server_of_stages_may_take_long_to_import(tmp_path, monkeypatch):
    """An hour passes with each look at the clock; it is waited for as long as it lives."""
    monkeypatch.setattr(time, "monotonic", count(0, 3600).__next__)
    listens = "time.sleep(0.1); open(sys.argv[1], 'w').close(); time.sleep(60)"
    assert (start_stage_server(write_server(tmp_path, monkeypatch, listens)) / "socket").exists()


@pytest.mark.parametrize(
    ("code", "end"), [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_a_server_of_stages_that_ends_is_said(tmp_path, monkeypatch, code, end):
    with pytest.raises(UserError, match=f"^server of stages: .* ended with {end} before") as said:
        start_stage_server(write_server(tmp_path, monkeypatch, code))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("answer", [b"", b"512\n", None], ids=["none", "pid", "gone"])
def test_a_stage_whose_server_ends_has_failed(tmp_path, answer):
    """A process id alone is no exit code: of 512 the shell would see 0. None: nothing listens."""
    words = [sys.executable, "-IS", stage_client.__file__, "python", "-m", "moecore.stages.code"]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        if answer is not None:
            listening.listen(1)
        environment = os.environ | {SOCKET_ENV: str(tmp_path / "socket")}
        client = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
        if answer is not None:
            line, _ = listening.accept()
            with line:
                line.recv(1 << 20)
                line.sendall(answer)
        _, printed = client.communicate()
    assert printed == "moecore.stages.code: the server of stages has ended; start again\n"
    assert client.returncode == 1


def test_nothing_computes_before_a_fork():
    """A process with several threads must not fork: their locks would stay taken for ever."""
    socket = str(forked.server() / "socket")
    # The first of them; the others are its forks, each waiting for a stage.
    server = min(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and served(pid, socket))
    assert len(os.listdir(f"/proc/{server}/task")) == 1


def served(process: str, socket: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8") as file:
            return f"tests.command_server\0{socket}\0" in file.read()
    except OSError:
        return False


def test_the_command_python(copied):
    done = copied.attempt(["python", "-m", "moecore.stages.prepare", "nothing"])
    assert done.returncode == 1 and "data.nothing" in done.stderr and "Traceback" not in done.stderr
    done = copied.attempt(["python", "-c", "import sys; print('plain', file=sys.stderr)"])
    assert done.returncode == 0 and "plain" in done.stderr


def test_a_stage_ends_with_who_started_it(copied):
    project = copied
    project.edit("pretrain:\n  {epochs: 2, batch: 64", "pretrain:\n  {epochs: 2000, batch: 64")
    words = ["python", "-m", "moecore.stages.pretrain", "dense", "0"]
    started = subprocess.Popen(words, cwd=project.folder, env=project.environment)
    while not any((project.folder / ".state").rglob("*.safetensors")):
        assert started.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.05)
    started.kill()
    started.wait()
    until = time.monotonic() + 20
    while running(project):
        assert time.monotonic() < until, "the stage goes on without its client"
        time.sleep(0.05)


def running(project: Project) -> list[str]:
    found = []
    for process in os.listdir("/proc"):
        try:
            if process.isdigit() and os.readlink(f"/proc/{process}/cwd") == str(project.folder):
                found.append(process)
        except OSError:
            continue
    return found


def test_a_second_driver_is_told_who_is_there_and_a_killed_one_leaves_nothing_running(copied):
    copied.forked = False  # so that it starts a server of its own
    copied.edit("pretrain:\n  {epochs: 2, batch: 64", "pretrain:\n  {epochs: 2000, batch: 64")
    words = [sys.executable, "-c", COMMAND, "run", "--jobs", "2"]
    place = {"cwd": copied.folder, "env": copied.environment}
    driver = subprocess.Popen(words, **place, stdout=subprocess.DEVNULL)
    while not any((copied.folder / ".state").rglob("checkpoint.safetensors")):
        assert driver.poll() is None, "it ended before a first checkpoint"
        time.sleep(0.05)
    before = (copied.folder / "params.yaml").read_bytes()
    second = copied.moecore("run", "-S", "finetune.epochs=3")
    assert second.returncode == 1
    assert (copied.folder / "params.yaml").read_bytes() == before, "refused before it writes"
    said = f"process {driver.pid} has been running the stages of this folder since 20"
    assert said in second.stderr and f"(`kill {driver.pid}`)" in second.stderr
    driver.kill()
    driver.wait()
    until = time.monotonic() + 20  # two seconds where nothing else runs
    while running(copied):
        assert time.monotonic() < until, "something goes on without its driver"
        time.sleep(0.05)


def test_what_killed_processes_left_is_removed_by_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = platform.node()
    left = tmp_path / f".out.json.{here}.{gone.pid}.part"
    folder = tmp_path / f".out.{here}.{gone.pid}.part"
    kept = [
        tmp_path / f".out.json.{here}.{os.getppid()}.part",  # it lives
        tmp_path / f".out.json.elsewhere.{gone.pid}.part",  # nobody knows
        tmp_path / f".other.json.{here}.{gone.pid}.part",
    ]
    folder.mkdir()
    (folder / "half").write_text("")
    for path in (left, *kept):
        path.write_text("half")
    write_json(tmp_path / "out.json", {})
    with atomic_folder(tmp_path / "out"):
        pass
    assert set(os.listdir(tmp_path)) == {"out.json", "out", *(path.name for path in kept)}


@pytest.fixture
def forking(monkeypatch) -> None:
    """The jobs of this process fork DVC, as those of a project do."""
    commands = forked.server() / "bin"
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    monkeypatch.setenv(SOCKET_ENV, str(forked.server() / "socket"))


APART = """\
vars: [../../params.yaml]
stages:
  train:
    wdir: ../..
    matrix: {method: "${methods}"}
    cmd: mkdir -p out && cp params.yaml out/${item.method}
    params: [rate]
    outs: ["out/${item.method}"]
"""


@pytest.mark.usefixtures("forking")
def test_a_large_studys_stages_run_from_files_of_their_own(tmp_path, monkeypatch):
    """They keep their names; what depends on them is in another file, with another lock."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("methods: [a, b]\nrate: 1\n")
    Path("steps/train").mkdir(parents=True)
    Path("steps/train/dvc.yaml").write_text(APART)
    Path("dvc.yaml").write_text("stages: {all: {cmd: ls out > all, deps: [out], outs: [all]}}\n")
    Project.at(tmp_path).with_dvc()
    assert set(query_pipeline_status().edges) == {("train@a", "all"), ("train@b", "all")}
    assert run_job_stages(("train@a", "train@b"), {}, [], Event(), QUIET) == 0
    assert run_job_stages(("all",), {}, [], Event(), QUIET) == 0
    assert set(read_dvc_locks()) == {"train@a", "train@b", "all"}
    assert Path("all").read_text() == "a\nb\n" and not query_pipeline_status().status


STAGE = """\
stages:
  b:
    cmd: head -c 2000000 /dev/zero > b.bin; cat b.in >> b.bin
    deps: [b.in]
    outs: [b.bin]
"""


@pytest.mark.usefixtures("forking")
def test_a_job_whose_disk_is_full_indeed_is_done_once_there_is_room(disk, monkeypatch, capfd):
    project = Project.at(disk.folder)
    monkeypatch.chdir(disk.folder)
    (disk.folder / "dvc.yaml").write_text(STAGE)
    (disk.folder / "b.in").write_text("1")
    project.with_dvc()
    job = ("b",)
    assert run_job_stages(job, {}, [], Event(), QUIET) == 0
    lock = (disk.folder / "dvc.lock").read_bytes()
    (disk.folder / "b.in").write_text("2")
    disk.fill(free=1_000_000)  # its output takes the place of the old one, its copy finds none
    capfd.readouterr()
    assert run_job_stages(job, {}, [], Event(), QUIET) != 0
    said = capfd.readouterr().out
    assert "No space left on device" in said and "Traceback" not in said
    assert (disk.folder / "dvc.lock").read_bytes() == lock
    disk.clear()
    assert run_job_stages(job, {}, [], Event(), QUIET) == 0
    assert (disk.folder / "dvc.lock").read_bytes() != lock


def test_a_page_that_finds_no_room_leaves_page_and_numbers_as_they_are(copied):
    reports, numbers = copied.folder / "reports", copied.folder / "artifacts/compare.json"
    page = reports / "index.html"
    for file in (page, numbers):
        file.write_text("{}")
    before = sorted(reports.rglob("*"))
    done = copied.attempt_limited(60_000, "compare")
    assert done.stderr.startswith("compare: reports/index.html: file too large")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert sorted(reports.rglob("*")) == before and page.read_text() == numbers.read_text() == "{}"
    copied.stage("compare")
    assert page.stat().st_size > 60_000 and numbers.stat().st_size > 1000

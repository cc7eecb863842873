"""A running training is seen while it runs: point by point, over kills, with dead servers.

Histories into MLflow, once: nothing twice, nothing lost, nothing stale.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from moecore.core.files import FullDisk, UserError
from moecore.run.history import record
from moecore.tracking import answers as waiting
from moecore.tracking import database, ui
from moecore.tracking import store as stores
from moecore.tracking.study import Counts
from moecore.tracking.sync import Importer, sync

WORK = Path(".state/pretrain/vmoe/0/key")
LIVE = """
import sys, time
from pathlib import Path
from moecore.run.history import record

first, last = int(sys.argv[1]), int(sys.argv[2])
with record("pretrain", None, method="vmoe", seed=0, work=Path(sys.argv[3])) as run:
    for step in range(first, last + 1):
        run.log(step, {"loss": float(step)})
    while len(sys.argv) > 4:
        time.sleep(0.05)
"""


def until(condition, seconds: float = 40.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def only(study):
    [run] = study.runs()
    return run


def steps(study) -> list[int]:
    return [step for step, _ in study.curve(only(study), "loss/total")]


def test_a_running_training_is_seen_point_by_point(study):
    importer = Importer()
    with record("pretrain", None, method="vmoe", seed=0, work=WORK) as run:
        run.log(1, {"loss": 1.0})
        assert importer.update() == Counts(added=1)
        assert only(study).info.status == "RUNNING"
        run.log(2, {"loss": 2.0})
        run.tag("device", "cpu")
        assert importer.update() == Counts(updated=1)
        assert steps(study) == [1, 2]
        assert only(study).data.tags["device"] == "cpu"
        run.log(3, {"loss": 3.0})
        run.table("rows", [{"a": 1}])
    assert importer.update() == Counts(updated=1, current=1)
    assert importer.update() == Counts(current=1)
    assert only(study).info.status == "FINISHED"
    assert study.curve(only(study), "loss/total") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert study.client.list_artifacts(only(study).info.run_id, "tables")


def test_only_new_points_are_sent(study, monkeypatch):
    importer = Importer()
    sent = []
    with record("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 1.0})
        importer.update()
        client = importer.client
        log = client.log_batch
        monkeypatch.setattr(client, "log_batch", lambda *a, **k: (sent.append(k), log(*a, **k)))
        importer.update()
        assert sent == []
        run.log(2, {"loss": 2.0})
        importer.update()
        # to the run and to its parent
        assert [[point.step for point in call["metrics"]] for call in sent] == [[2], [2]]


def test_another_importer_in_between_sends_nothing_twice(study):
    first = Importer()
    with record("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 1.0})
        first.update()
        run.log(2, {"loss": 2.0})
        Importer().update()
        run.log(3, {"loss": 3.0})
        first.update()
        assert steps(study) == [1, 2, 3]


def test_a_killed_run_ends_and_its_resumption_logs_no_step_twice(study):
    Path("live.py").write_text(LIVE)
    importer = Importer()
    process = study.start("live.py", "1", "4", str(WORK), "wait")
    until(lambda: importer.update() and study.runs() and steps(study) == [1, 2, 3, 4])
    process.send_signal(signal.SIGKILL)
    process.wait()
    importer.update()
    assert only(study).info.status == "KILLED"
    process = study.start("live.py", "3", "6", str(WORK), "wait")  # the checkpoint was at step 2
    until(lambda: importer.update() and only(study).info.status == "RUNNING")
    until(lambda: importer.update() and steps(study) == [1, 2, 3, 4, 5, 6])
    process.terminate()
    process.wait()
    importer.update()
    assert study.start("live.py", "7", "7", str(WORK)).wait(timeout=60) == 0
    importer.update()
    assert only(study).info.status == "FINISHED"
    assert study.curve(only(study), "loss/total") == [(step, float(step)) for step in range(1, 8)]


def test_a_store_that_fails_in_between_loses_nothing(study, monkeypatch):
    importer = Importer()
    with record("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 1.0})
        importer.update()
        client = importer.client
        monkeypatch.setattr(client, "log_batch", lambda *a, **k: 1 / 0)
        run.log(2, {"loss": 2.0})
        with pytest.raises(ZeroDivisionError):
            importer.update()
    assert importer.update() == Counts(updated=1, current=1)
    assert steps(study) == [1, 2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_ui_serves_and_imports_until_it_is_ended(study):
    port = free_port()
    process = study.moecore("ui", "--port", str(port))
    try:
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port}/")
        with record("pretrain", None, method="vmoe", seed=0) as run:
            run.log(1, {"loss": 1.0})
            until(lambda: study.runs() and steps(study) == [1], 60)
            assert only(study).info.status == "RUNNING"
        until(lambda: only(study).info.status == "FINISHED")
        until(lambda: answers(port), 90)
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    assert not answers(port)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_taken_is_one_clear_line(study):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port}: another program answers there; choose"):
            ui.ui(port)


def test_a_server_that_comes_and_goes_is_said_once(study, monkeypatch, capsys):
    monkeypatch.setattr(ui, "EVERY", 0.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    for name, value in {"TIMEOUT": "1", "MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    study.write()
    rounds = iter(range(5))

    def serving() -> bool:
        number = next(rounds)
        if number == 2:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", study.store)
        return number < 4

    ui._import_while(serving)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("http://127.0.0.1:9: MLflow does not answer")
    assert second.endswith("1 runs added, 0 updated, 0 ended; 1 are current")


def test_a_stage_knows_nothing_of_mlflow(study):
    code = "import sys, stages.pretrain, moecore.pipeline.parallel as _; "
    code += "assert 'mlflow' not in sys.modules"
    _, error = study.start("-c", code).communicate(timeout=300)
    assert error == ""


PUBLISHED = Path("artifacts/history/pretrain/vmoe/0")


def imported() -> Counts:
    """What a process of its own does."""
    return Importer().update()


def test_a_second_import_adds_nothing(study, run_of):
    study.write(0)
    study.write(1)
    assert imported() == Counts(added=2, current=2)
    assert imported() == Counts(current=2)
    run = run_of(0)
    assert run.info.run_name == "pretrain vmoe seed 0"
    assert run.info.status == "FINISHED"
    assert study.curve(run, "loss/total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert study.curve(run, "loss/share_1") == [(1, 0.5), (2, 0.5), (3, 0.5)]  # no @ in MLflow
    assert study.curve(run, "train/test.accuracy overall") == [(0, 0.5)]
    assert run.data.params["epochs"] == "3"
    assert len(run.data.params["text"]) == 500
    expected = {"stage": "pretrain", "method": "vmoe", "runtime.device": "cpu"}
    assert run.data.tags | expected | {"dvc.current": "true"} == run.data.tags
    assert run.inputs.dataset_inputs[0].dataset.name == "toy"
    tables = study.client.list_artifacts(run.info.run_id, "tables")
    assert [file.path for file in tables] == ["tables/rows.json"]


def test_a_replaced_run_is_no_longer_current(study):
    study.write()
    imported()
    study.write()
    assert imported() == Counts(added=1, current=1)
    assert sorted(run.data.tags["dvc.current"] for run in study.runs()) == ["false", "true"]


def test_a_run_restored_from_the_cache_is_current_again(study):
    study.write()
    shutil.copytree(PUBLISHED, "cached")
    imported()
    study.write()
    imported()
    shutil.rmtree(PUBLISHED)
    shutil.copytree("cached", PUBLISHED)
    assert imported() == Counts(current=1)
    first, second = sorted(study.runs(), key=lambda run: run.info.start_time)
    assert first.data.tags["dvc.current"] == "true"
    assert second.data.tags["dvc.current"] == "false"


def test_what_dvc_locked_is_current(study, run_of):
    study.write(0)
    study.write(1)
    entry = {"cmd": "x", "outs": [{"path": str(PUBLISHED)}]}
    Path("dvc.lock").write_text(json.dumps({"stages": {"pretrain@vmoe-0": entry}}))
    assert imported() == Counts(added=2, current=1)
    assert run_of(0).data.tags["dvc.current"] == "true"
    assert run_of(0).data.tags["dvc.stage"] == "pretrain@vmoe-0"
    assert run_of(1).data.tags["dvc.current"] == "false"


@pytest.mark.parametrize(
    "content", ["", "stages: [", "stages: {code: 3}", "stages: {a: {outs: 3}}"]
)
def test_a_damaged_lock_file_is_named_once(study, run_of, capsys, content):
    study.write(0)
    Path("dvc.lock").write_text(content)
    importer = Importer()
    assert importer.update() == Counts(added=1)
    assert run_of(0).data.tags["dvc.current"] == "false"
    said = capsys.readouterr().err.strip()
    assert "dvc.lock: is not as DVC writes it" in said and "\n" not in said
    study.write(1)
    importer.update()
    assert "dvc.lock" not in capsys.readouterr().err


def test_a_run_whose_history_and_process_are_gone_is_ended(study, run_of):
    study.write()
    imported()
    run = run_of(0)
    study.client.update_run(run.info.run_id, status="RUNNING")
    study.client.set_tag(run.info.run_id, "pid", "999999")
    (PUBLISHED / "history.jsonl").unlink()
    study.write(seed=1)
    assert imported().ended == 1
    assert run_of(0).info.status == "KILLED"


def test_a_failed_run_says_why(study, run_of):
    with pytest.raises(UserError), record("pretrain", None, method="vmoe", seed=0):
        raise UserError("the loss is not finite")
    imported()
    assert run_of(0).info.status == "FAILED"
    assert run_of(0).data.tags["error"] == "UserError: the loss is not finite"


@pytest.mark.filterwarnings("ignore")
def test_a_dead_server_is_one_clear_line(study, monkeypatch):
    study.write()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="^http://127.0.0.1:9: MLflow does not answer"):
        sync()


def test_three_processes_make_one_store_and_one_run_and_again_where_it_was_deleted(
    study, tmp_path, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    study.store = f"sqlite:///{tmp_path}/mlflow.db"
    study.write()
    (tmp_path / "mlflow.db.part").write_text("of one that was killed while it made the database")
    for process in [study.moecore("sync") for _ in range(3)]:
        _, error = process.communicate(timeout=300)
        said = [line for line in error.splitlines() if "waits for another import" not in line]
        assert (process.returncode, said) == (0, [])
    assert len(study.runs()) == 1 and steps(study) == [1, 2, 3]
    assert not (tmp_path / "mlflow.db.part").exists()
    assert (tmp_path / "mlruns").is_dir()
    (tmp_path / "mlflow.db").unlink()
    told, _ = study.moecore("sync").communicate(timeout=120)
    assert told == f"{study.store}: 1 runs added, 0 updated, 0 ended; 1 are current\n"


def whole(length: int, *more: str) -> bytes:
    """The beginning of an answer that has so many bytes."""
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {length}", *more, "", ""]).encode()


# What the server sends, a piece every 0.3 s; it closes after the last but for "silence".
SERVERS = {
    "silence": ([], "Read timed out"),
    "drip": ([whole(100), *[b" "] * 99], "no whole answer within 2 s"),
    "cut": ([whole(1000) + b"{"], "Connection broken"),
    "garbage": ([b"\x00\xff\x13\r\n\r\n"], "Connection aborted"),
    "html": ([whole(6) + b"<html>"], "not in a valid JSON format"),
    "broken": ([b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], "500 error responses"),
    "later": ([b"HTTP/1.1 503 No\r\nRetry-After: 600\r\nContent-Length: 0\r\n\r\n"], "503"),
}


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The address of a server that answers every call with the pieces of ``kind``."""
    open_ones = []
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        for piece in SERVERS[kind][0]:
            try:
                connection.sendall(piece)
            except OSError:  # whom it answered has left
                break
            time.sleep(0.3)
        if kind != "silence":
            connection.close()

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            if connection.recv(1) == b"":  # the end of the test
                return
            connection.recv(65536)
            open_ones.append(connection)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        socket.create_connection(listening.getsockname()).close()
        thread.join()
        for connection in (*open_ones, listening):
            connection.close()


def recovers(study, monkeypatch) -> None:
    """In the store that answers, one sync imports all, once."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", study.store)
    assert sync().endswith("1 runs added, 0 updated, 0 ended; 1 are current")
    assert Importer().update() == Counts(current=1)
    assert steps(study) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_does_not_answer_well_is_one_clear_line(study, monkeypatch, kind):
    monkeypatch.setenv(waiting.TIMEOUT, "1")
    monkeypatch.setenv(waiting.RETRIES, "0")
    study.write()
    with server(kind) as address, pytest.raises(UserError) as raised:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        sync()
    said = str(raised.value)
    assert said.startswith(f"{address}: MLflow does not answer (") and "\n" not in said
    assert SERVERS[kind][1] in said
    assert said.endswith("`moecore sync` imports what is missing once it does")
    recovers(study, monkeypatch)


def test_calls_have_a_limit_and_are_not_repeated(monkeypatch):
    for name in waiting.IMPATIENT:
        monkeypatch.delenv(name, raising=False)
    stores.settle()
    assert waiting.limit() == 20
    # a run that is asked for twice may be made twice
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER"] == "false"
    monkeypatch.setenv(waiting.TIMEOUT, "60")  # the user's own
    monkeypatch.setenv(waiting.RETRIES, "1")
    stores.settle()
    assert waiting.limit() == 240
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "soon")
    with pytest.raises(UserError, match="MLFLOW_HTTP_REQUEST_TIMEOUT: found 'soon'; allowed"):
        waiting.limit()


@pytest.mark.parametrize(
    "address, said",
    [
        ("nonsense://x", "nonsense://x: MLflow cannot use it \\(.*allowed in .MLFLOW_TRACKING_URI"),
        ("sqlite:////proc/none/x.db", "/proc/none/x.db: MLflow's database cannot be written there"),
    ],
    ids=["scheme", "folder"],
)
def test_an_address_that_is_none_is_one_clear_line(study, monkeypatch, address, said):
    study.write()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(UserError, match=f"^{said}"):
        sync()
    recovers(study, monkeypatch)


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwritten(file: Path) -> None:
    """A page of one table, which nothing reads that an import asks first."""
    with closing(sqlite3.connect(file)) as opened:
        words = "SELECT rootpage FROM sqlite_master WHERE name = 'params'"
        [page] = opened.execute(words).fetchone()
        [size] = opened.execute("PRAGMA page_size").fetchone()
    with open(file, "r+b") as written:
        written.seek((page - 1) * size)
        written.write(b"x" * 64)


def of_another(file: Path) -> None:
    file.unlink()
    ask(file, "CREATE TABLE cars (wheels)")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def ask(file: Path, words: str) -> None:
    with closing(sqlite3.connect(file)) as opened, opened:
        opened.execute(words)


DAMAGES = [
    (torn, "MLflow's database is damaged .*; move it away"),
    (overwritten, "MLflow's database is damaged .[Pp]age .*; move it away"),
    (lambda file: file.write_bytes(b"hello" * 999), "MLflow's database is damaged .*; move it"),
    (folder, "a folder, not MLflow's database; move it away"),
    (of_another, "the database of another program, with the tables cars; name another"),
    (
        lambda file: ask(file, "UPDATE alembic_version SET version_num = 'ffffffffffff'"),
        "made by another version of MLflow .*`mlflow db upgrade sqlite:/.*; else move it away",
    ),
]


DAMAGED = ("torn", "overwritten", "text", "folder", "another's", "version")


@pytest.mark.parametrize("damage, said", DAMAGES, ids=DAMAGED)
def test_a_database_that_is_none_is_named_and_left_alone(
    study, tmp_path, monkeypatch, damage, said
):
    study.write()
    file = tmp_path / "mlflow.db"
    good = study.store.removeprefix("sqlite:///")
    shutil.copy(good, file)
    damage(file)
    before = None if file.is_dir() else file.read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    with pytest.raises(UserError, match=f"^{file}: {said}"):
        sync()
    assert before == (None if file.is_dir() else file.read_bytes())
    # In place of a new one, which takes seconds to make; MLflow may have the other still open.
    shutil.copy(good, tmp_path / "new.db")
    study.store = f"sqlite:///{tmp_path}/new.db"
    recovers(study, monkeypatch)


def test_a_database_that_is_moved_away_while_it_is_used_gets_nothing(study, tmp_path, monkeypatch):
    file = tmp_path / "mlflow.db"
    shutil.copy(study.store.removeprefix("sqlite:///"), file)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    importer = Importer()
    study.write()
    importer.update()
    file.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(UserError, match=f"^{file}: moved away, .*; end `moecore ui` and start"):
            importer.update()
    assert not file.exists()


def test_a_locked_database_is_one_clear_line(study, monkeypatch):
    monkeypatch.setattr(database, "WAIT", 0.2)
    study.write()
    file = study.store.removeprefix("sqlite:///")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=f"^{file}: locked by another program for .*fuser"):
            sync()
    recovers(study, monkeypatch)


def test_a_store_that_fails_within_an_import_is_one_clear_line(study, monkeypatch):
    from mlflow.exceptions import MlflowException

    importer = Importer()
    study.write()
    importer.update()
    study.write()

    def locked(*_, **__):
        raise MlflowException("(sqlite3.OperationalError) database is locked\n[SQL: SELECT 1]")

    monkeypatch.setattr(importer.client, "log_batch", locked)
    file = study.store.removeprefix("sqlite:///")
    with pytest.raises(UserError, match=f"^{file}: locked by another program .*moecore sync`$"):
        importer.update()
    assert importer.update().current == 1
    assert len(study.runs()) == 2
    for run in study.runs():
        assert [step for step, _ in study.curve(run, "loss/total")] == [1, 2, 3]


def test_an_import_that_never_ends_does_not_hold_another_for_ever(
    study, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stores, "PATIENCE", 0.4)
    monkeypatch.setattr(stores, "QUIET", 0.1)
    study.write()
    lock = tmp_path / ".state/import.lock"
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"^{lock}: held for .* by another `moecore sync`"):
            sync()
    assert capsys.readouterr().err == f"{lock}: waits for another import to end\n"
    recovers(study, monkeypatch)


def test_a_run_that_a_slow_server_made_twice_is_there_once(study):
    study.write()
    Importer().update()
    first = only(study)
    tags = {name: first.data.tags[name] for name in ("moecore.uid", "level")}
    study.client.create_run(first.info.experiment_id, tags=tags)
    assert Importer().update() == Counts(current=1)
    assert only(study).info.run_id == first.info.run_id


def test_a_full_database_is_one_clear_line_and_the_import_goes_on_later(study, monkeypatch):
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def smallest(connection, _) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # so many as it has, then it is full

    study.write(steps=2000)
    file = database.file_of(study.store)
    event.listen(Engine, "connect", smallest)
    try:
        with monkeypatch.context() as patch, pytest.raises(FullDisk) as error:
            patch.setattr(stores, "uri", lambda: f"{study.store}?full")  # a connection anew
            Importer().update()
    finally:
        event.remove(Engine, "connect", smallest)
    said = f"{file}: could not be written, no space left on device; "
    assert str(error.value).startswith(said) and "\n" not in str(error.value)
    Importer().update()
    assert len(steps(study)) == 2000


def test_pictures_that_find_no_room_are_drawn_the_next_time(study, monkeypatch, limited):
    from matplotlib.figure import Figure

    from moecore.tracking import figures

    drawn = Path("drawn")
    monkeypatch.setattr(figures, "figures", lambda *_: [("curve", Figure())])
    with limited(1000), pytest.raises(FullDisk) as error:
        figures.draw(study.folder, {}, drawn)
    said = f"{drawn}/curve.png: could not be written, file too large; "
    assert str(error.value).startswith(said) and list(drawn.iterdir()) == []
    assert figures.draw(study.folder, {}, drawn) == ["curve"]
    assert (drawn / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_store_on_a_disk_that_is_full_indeed_is_filled_later(study, monkeypatch, disk):
    file = disk.folder / "mlflow.db"
    shutil.copyfile(database.file_of(study.store), file)
    address = f"sqlite:///{file}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    study.store = address
    study.write(steps=3000)
    disk.fill(free=8192)
    with pytest.raises(FullDisk) as error:
        sync()
    assert str(error.value).startswith(f"{file}: could not be written, no space left on device; ")
    about = re.search(
        rf"; with all histories on disk, {file} takes about (\d\S+) bytes$", str(error.value)
    )
    disk.clear()
    sync()
    assert len(steps(study)) == 3000
    assert about and 0.5 < int(about[1].replace(",", "")) / file.stat().st_size < 2
    assert only(study).info.status == "FINISHED"

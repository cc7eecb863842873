"""A running training is seen while it runs: point by point, over kills, with dead servers.

Histories into MLflow, once: nothing twice, nothing lost, nothing stale.
"""

import json
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.run.history import record
from moecore.tracking import ui
from moecore.tracking.study import Counts
from moecore.tracking.sync import Importer, sync

WORK = Path(".state/pretrain/vmoe/0/key")
LIVE = """
import sys, time
from pathlib import Path
from moecore.core.files import UserError
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
    code = "import sys, moecore.run.history; assert 'mlflow' not in sys.modules"
    assert study.start("-c", code).wait(timeout=60) == 0


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


def test_two_processes_make_one_store_and_one_run_and_again_where_it_was_deleted(
    study, tmp_path, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    study.store = f"sqlite:///{tmp_path}/mlflow.db"
    study.write()
    for process in [study.moecore("sync"), study.moecore("sync")]:
        _, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (0, "")
    assert len(study.runs()) == 1
    assert (tmp_path / "mlruns").is_dir()
    (tmp_path / "mlflow.db").unlink()
    told, _ = study.moecore("sync").communicate(timeout=120)
    assert told == f"{study.store}: 1 runs added, 0 updated, 0 ended; 1 are current\n"

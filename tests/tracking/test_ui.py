"""`moecore ui`: MLflow's own server beside an import that sees running trainings."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from moecore.core.files import UserError
from moecore.run.history import record
from moecore.tracking import ui
from moecore.tracking.sync import Importer
from tests.browser import opened
from tests.tracking.conftest import calibrate, only_run

# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
WAIT = 120_000  # milliseconds


def wait_until(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ui.HOST, port)) == 0


def test_the_first_view_has_metrics_data_source_and_live_runs(study, request):
    Path("params.yaml").write_text("run: {methods: [dense, vmoe]}\n")
    study.write()
    calibrate()
    with socket.socket() as free:
        free.bind((ui.HOST, 0))
        port = free.getsockname()[1]
    process = study.moecore("ui", "--port", str(port))
    try:
        assert "2 runs added" in process.stdout.readline()
        address = process.stdout.readline().strip()
        assert address.startswith(f"http://{ui.HOST}:{port}/#/experiments/")
        with record("pretrain", None, method="dense", seed=0) as run:
            run.log(1, {"loss": 1.0})
            wait_until(lambda: sum("dvc.current" in run.data.tags for run in study.parents()) == 2)
            assert study.parent("dense/0").info.status == "RUNNING"
        wait_until(lambda: study.parent("dense/0").info.status == "FINISHED")
        wait_until(lambda: answers(port))
        browser = request.getfixturevalue("browser")
        with opened(browser, address, 1800, "light", KNOWN) as page:
            body = page.locator("body")
            for words in ("vmoe seed 0", "dense seed 0", "ece_after", "0.5", "toy", "Source"):
                expect(body).to_contain_text(words, timeout=WAIT)
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    assert not answers(port)


def test_a_running_training_is_seen_point_by_point(study, monkeypatch):
    importer = Importer()
    with record("pretrain", None, method="vmoe", seed=0) as run:
        for step in (1, 2):
            run.log(step, {"loss": float(step)})
            importer.import_all()
            points = [(one, float(one)) for one in range(1, step + 1)]
            assert study.curve(only_run(study), "loss/total") == points
            assert study.curve(study.parent(), "loss/pretrain total") == points
            assert only_run(study).info.status == "RUNNING"
        assert importer.import_all()["updated"] == 0
    assert importer.import_all()["updated"] == 1
    assert study.parent().info.status == "FINISHED"


def test_a_port_that_is_taken_is_one_clear_line(study):
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port}: .*--port"):
            ui.serve_ui(port)


def test_a_server_that_goes_is_said_once_and_the_import_goes_on(study, monkeypatch, capsys):
    monkeypatch.setattr(ui, "SECONDS", 0.0)
    study.write()
    rounds = iter(range(5))

    def is_serving() -> bool:
        number = next(rounds)
        os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9" if number < 2 else study.store
        return number < 4

    ui.import_while(is_serving, Importer())
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("http://127.0.0.1:9: ") and "1 runs added" in second

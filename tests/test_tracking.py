"""MLflow as a view of the histories: real sqlite stores, dead servers, kills and resumes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moecore.config import Config
from moecore.history import record
from moecore.history_file import read_lines
from moecore.sources import ROOT

CARD = {"name": "toy", "files": {"a": "0123"}, "counts": {"train": {"x": 1}}, "source": "here", "channels": 1, "size": 8, "classes": ["x", "y"], "mean": [0.5], "std": [0.5]}


class Params(Config):
    epochs: int = 3
    text: str = "x" * 600


@pytest.fixture(scope="module")
def fresh_store(tmp_path_factory) -> Path:
    """An empty database, made once: creating one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    run_tracking(folder, "sync", MLFLOW_TRACKING_URI=f"sqlite:///{folder / 'mlflow.db'}")
    return folder / "mlflow.db"


@pytest.fixture
def study(tmp_path, monkeypatch, fresh_store) -> Path:
    """An empty study with an empty store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_TRACKING", "off")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").write_bytes(fresh_store.read_bytes())
    return tmp_path


def run_tracking(folder: Path, *words: str, **env: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": str(folder)} | env
    done = subprocess.run([sys.executable, "-m", "moecore.tracking", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def write_run(seed: int = 0, steps: int = 3) -> None:
    with record("pretrain", Params(), method="vmoe", seed=seed) as run:
        for step in range(1, steps + 1):
            run.log(step, {"loss": 1 / step, "share@1": 0.5})
        run.tag("runtime.device", "cpu")
        run.dataset(CARD)
        run.table("rows", [{"a": 1}])
        run.summary({"test": {"accuracy": 0.5}})


def stored(folder: Path) -> list:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    found = client.get_experiment_by_name("moecore")
    return [(client, run) for run in client.search_runs([found.experiment_id])] if found else []


def history_of(client, run, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def test_sync_twice_adds_nothing_and_rebuilds_a_deleted_database(study):
    write_run(0), write_run(1)
    assert "2 runs added, 0 updated" in run_tracking(study, "sync")
    assert "0 runs added, 0 updated, 0 ended; 2 are current" in run_tracking(study, "sync")
    client, run = next(pair for pair in stored(study) if pair[1].data.tags["seed"] == "0")
    assert run.info.run_name == "pretrain vmoe seed 0" and run.info.status == "FINISHED"
    assert history_of(client, run, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)] and len(history_of(client, run, "share_1")) == 3
    assert run.data.metrics["test.accuracy"] == 0.5
    assert run.data.params["epochs"] == "3" and len(run.data.params["text"]) == 500
    assert run.data.tags | {"stage": "pretrain", "method": "vmoe", "runtime.device": "cpu", "dvc.current": "true"} == run.data.tags
    assert run.inputs.dataset_inputs[0].dataset.name == "toy"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "tables")] == ["tables/rows.json"]
    assert Path(study, "mlruns").is_dir()
    (study / "mlflow.db").unlink()
    assert "2 runs added" in run_tracking(study, "sync")


def test_a_replaced_run_is_no_longer_current(study):
    write_run()
    run_tracking(study, "sync")
    write_run()
    assert "1 runs added, 0 updated, 0 ended; 1 are current" in run_tracking(study, "sync")
    assert sorted(run.data.tags["dvc.current"] for _, run in stored(study)) == ["false", "true"]


def test_ghosts_of_dvc_lock_are_not_current(study):
    write_run(0), write_run(1)
    lock = {"stages": {"pretrain@vmoe-0": {"cmd": "x", "outs": [{"path": "artifacts/history/pretrain/vmoe/0"}]}}}
    (study / "dvc.lock").write_text(json.dumps(lock))
    assert "2 runs added" in run_tracking(study, "sync")
    assert {run.data.tags["seed"]: run.data.tags["dvc.current"] for _, run in stored(study)} == {"0": "true", "1": "false"}


LIVE = """
import sys, time
from moecore.history import record
from pathlib import Path
first, last, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with record("pretrain", None, method="vmoe", seed=0, work=Path(".state/key")) as run:
    print("open", flush=True)
    for step in range(first, last + 1):
        run.log(step, {"loss": float(step)})
    while then == "wait" and not Path("go").exists():
        if Path("more").exists():
            Path("more").unlink()
            run.log(last + 1, {"loss": float(last + 1)})
        time.sleep(0.05)
"""


def start(study: Path, *words: object, **env: str) -> subprocess.Popen:
    (study / "live.py").write_text(LIVE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOECORE_TRACKING": "on", "MOECORE_FOLLOW_AFTER": "0.1"} | env
    return subprocess.Popen([sys.executable, "live.py", *map(str, words)], cwd=study, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = 40.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.3)
    raise AssertionError("it did not happen in time")


def only(study: Path, status: str):
    return next(((client, run) for client, run in stored(study) if run.info.status == status), None)


def test_a_killed_run_is_mirrored_ended_and_resumed_without_a_step_twice(study):
    process = start(study, 1, 4, "wait")
    wait_for(lambda: (pair := only(study, "RUNNING")) and pair[1].data.metrics.get("loss") == 4.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: only(study, "KILLED"))
    (study / "go").touch()
    assert start(study, 3, 6, "end").wait(timeout=60) == 0  # the checkpoint was at step 2
    run_tracking(study, "sync")
    [(client, run)] = stored(study)
    assert run.info.status == "FINISHED"
    assert history_of(client, run, "loss") == [(step, float(step)) for step in range(1, 7)]


@pytest.mark.parametrize("answers", [False, True], ids=["closed port", "never answers"])
def test_a_dead_server_neither_fails_nor_slows_a_stage(study, answers):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        if answers:
            server.listen()
        begun = time.monotonic()
        process = start(study, 1, 3, "wait", MLFLOW_TRACKING_URI=uri)
        log = study / ".state/key/tracking.log"
        wait_for(log.exists, 60)
        (study / "go").touch()
        _, error = process.communicate(timeout=20)
        assert process.returncode == 0 and time.monotonic() - begun < 60
        assert error.count("\n") == 1 and "gave up" in error and uri in error
    assert read_lines(study / "artifacts/history/pretrain/vmoe/0")[-1]["status"] == "FINISHED"


def test_a_server_that_dies_in_mid_run_loses_nothing(study):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri, store = f"http://127.0.0.1:{port}", f"sqlite:///{study / 'mlflow.db'}"
    words = ["server", "--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    server = subprocess.Popen([sys.executable, "-m", "mlflow", *words], cwd=study, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: listening(port), 90)
        process = start(study, 1, 3, "wait", MLFLOW_TRACKING_URI=uri)
        wait_for(lambda: (pair := only(study, "RUNNING")) and pair[1].data.metrics.get("loss") == 3.0, 90)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    (study / "more").touch()
    wait_for((study / ".state/key/tracking.log").exists, 90)
    (study / "go").touch()
    _, error = process.communicate(timeout=20)
    assert process.returncode == 0 and error.count("\n") == 1 and "gave up" in error and uri in error
    assert "0 runs added, 1 updated" in run_tracking(study, "sync")
    [(client, run)] = stored(study)
    assert run.info.status == "FINISHED"
    assert history_of(client, run, "loss") == [(step, float(step)) for step in range(1, 5)]


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_whose_history_and_process_are_gone_is_ended(study):
    write_run()
    run_tracking(study, "sync")
    [(client, run)] = stored(study)
    client.update_run(run.info.run_id, status="RUNNING")
    client.set_tag(run.info.run_id, "pid", "999999")
    (study / "artifacts/history/pretrain/vmoe/0/history.jsonl").unlink()
    write_run(seed=1)
    assert "1 ended" in run_tracking(study, "sync")
    assert client.get_run(run.info.run_id).info.status == "KILLED"


def test_several_processes_create_one_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_TRACKING", "off")
    write_run()
    env = os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": str(tmp_path)}
    env.pop("MLFLOW_TRACKING_URI", None)
    both = [subprocess.Popen([sys.executable, "-m", "moecore.tracking", "sync"], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    run_tracking(tmp_path, "sync")
    assert len({run.data.tags["moecore.uid"] for _, run in stored(tmp_path)}) == 1


def test_a_dead_server_is_one_clear_line_for_sync(study):
    write_run()
    assert "MLflow does not answer" in run_tracking(study, "sync", MLFLOW_TRACKING_URI="http://127.0.0.1:9")


def test_a_model_is_logged_with_its_signature_and_loads(study):
    torch = pytest.importorskip("torch")
    from moecore.artifacts import load_model, save_model
    from moecore.backbones.image import ImageSpec
    from moecore.backbones.vit import Vit

    image = ImageSpec(channels=1, size=8, classes=("x", "y"), mean=(0.5,), std=(0.5,))
    model = Vit(patch=4, width=16, depth=2, heads=2).build(image).eval()
    with record("pretrain", None, method="dense", seed=0) as run:
        run.log(1, {"loss": 1.0})
        run.dataset(CARD)
        save_model("artifacts/pretrain/dense/0", model)
        run.model("artifacts/pretrain/dense/0")
    assert "1 runs added" in run_tracking(study, "sync")
    [(client, run)] = stored(study)
    assert run.info.status == "FINISHED" and run.data.tags["moecore.model"].endswith("artifacts/pretrain/dense/0")
    [logged] = client.search_logged_models([run.info.experiment_id])
    folder = Path(logged.artifact_location.removeprefix("file://"))
    assert not [file for file in folder.rglob("*") if file.suffix in (".pkl", ".pickle", ".pt", ".pth")]
    script = (
        "import sys, mlflow.pyfunc, numpy\n"
        "model = mlflow.pyfunc.load_model(sys.argv[1])\n"
        "print(model.metadata.signature.inputs.to_dict()[0]['tensor-spec']['shape'])\n"
        "numpy.save(sys.argv[2], model.predict({'images': numpy.ones((3, 1, 8, 8), 'float32')}))"
    )
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{study / 'mlflow.db'}"}
    env.pop("PYTHONPATH", None)  # the logged model brings its code
    done = subprocess.run([sys.executable, "-c", script, str(folder), "scores.npy"], cwd=study, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(-1, 1, 8, 8)" in done.stdout
    import numpy

    with torch.inference_mode():
        expected = load_model("artifacts/pretrain/dense/0")(torch.ones(3, 1, 8, 8)).prediction.numpy()
    numpy.testing.assert_allclose(numpy.load("scores.npy", allow_pickle=False), expected, rtol=1e-5, atol=1e-6)

"""Histories into MLflow, once: nothing twice, nothing lost, nothing stale."""

import json
import shutil
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.run.history import record
from moecore.tracking.study import Counts
from moecore.tracking.sync import Importer, sync

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

import json
import re
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from moecore.core.files import UserError, to_jsonable
from moecore.run.history_file import flatten_keys
from moecore.run.run_record import record_run
from moecore.tracking import mlflow_connection, sync
from moecore.tracking import sync as module
from moecore.tracking.mlflow_run import select_changed_params, split_metrics_and_params
from moecore.training.method import Method
from moecore.training.monitor import LayerTotals, MonitorSettings, build_routing_point
from moecore.training.settings import Training
from tests.tracking.conftest import Params, calibrate, only_run

PUBLISHED = Path("artifacts/history/pretrain/vmoe/0")
WORK = Path(".state/pretrain/vmoe/0/key")
LIVE = """
import sys, time
from pathlib import Path
from moecore.run.run_record import record_run

first, last = int(sys.argv[1]), int(sys.argv[2])
with record_run("pretrain", None, method="vmoe", seed=0, work=Path(sys.argv[3])) as run:
    for step in range(first, last + 1):
        run.log(step, {"loss": float(step)})
    print("logged", flush=True)
    while len(sys.argv) > 4:
        time.sleep(0.05)
"""


def import_all() -> dict[str, int]:
    """What a process of its own does; the counts that are not 0."""
    return {word: count for word, count in sync.AllStudiesImporter().import_all().items() if count}


def everything(study) -> list:
    runs = [(run.info, run.data.to_dictionary()) for run in study.every_run()]
    return sorted((info.run_id, info.status, info.end_time, data) for info, data in runs)


def test_a_second_import_adds_nothing_and_a_grown_study_adds(study):
    study.write()
    calibrate()
    assert import_all() == {"runs added": 2, "current": 2}
    before = everything(study)
    assert sync.sync_runs().endswith("0 runs added, 0 updated, 0 ended; 2 are current")
    assert everything(study) == before
    study.write(seed=1)
    study.write(stage="finetune")
    assert import_all() == {"runs added": 2, "current": 4} and len(study.parents()) == 2


def test_a_run_has_all_that_its_history_says(study):
    study.write()
    import_all()
    run = only_run(study)
    assert (run.info.run_name, run.info.status) == ("pretrain vmoe seed 0", "FINISHED")
    assert study.curve(run, "loss/total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert study.curve(run, "loss/share_1") == [(1, 0.5), (2, 0.5), (3, 0.5)]  # no @ in MLflow
    assert study.curve(run, "train/test.accuracy overall") == [(0, 0.5)]
    assert run.data.params["epochs"] == "3" and len(run.data.params["text"]) == 500
    assert run.data.tags["runtime.device"] == "cpu" and run.data.tags["dvc.current"] == "true"
    tables = study.client.list_artifacts(run.info.run_id, "tables")
    assert [file.path for file in tables] == ["tables/rows.json"]
    for run in (only_run(study), study.parent()):
        [used] = run.inputs.dataset_inputs
        assert used.dataset.name == "toy" and re.fullmatch("[0-9a-f]{8}", used.dataset.digest)
        tags = run.data.tags
        assert tags["mlflow.source.type"] == "LOCAL" and tags["mlflow.source.name"]


def test_stages_are_children_of_one_run_with_headline_numbers_and_curves_in_a_view(study):
    study.write()
    study.write(stage="finetune")
    with record_run("prepare", None, phase="pretrain"):
        pass
    calibrate()
    import_all()
    [measured] = [run for run in study.runs() if run.data.tags["stage"] == "calibrate"]
    [drawn] = study.client.list_artifacts(measured.info.run_id, "figures")
    assert drawn.path == "figures/reliability.png"
    assert measured.data.tags["moecore.figures"] == "reliability"
    parent = study.parent()
    assert (parent.info.run_name, parent.info.status) == ("vmoe seed 0", "FINISHED")
    shared = study.parent("shared").info.run_id
    own = dict.fromkeys(("pretrain", "finetune", "calibrate"), parent.info.run_id)
    assert study.parent_ids() == own | {"prepare": shared}
    assert study.curve(parent, "loss/finetune total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert parent.data.params["epochs"] == "3" and parent.data.metrics["ece/pretrain"] == 0.5
    calibrate(ece=0.123456)
    import_all()
    assert study.parent().info.run_id == parent.info.run_id  # the model is the same
    names = ("ece/pretrain", "ece/pre.lo", "ece/pre.hi")
    assert [study.parent().data.metrics[name] for name in names] == [0.1235, 0.4, 0.6]
    state = study.view()
    columns = [f"metrics.`{name}`" for name in names]
    assert state["selectedColumns"][:4] == [*columns, "attributes.`Dataset`"]  # and no loss
    assert (state["orderByKey"], state["orderByAsc"]) == (columns[0], True)
    shown = study.client.search_runs([parent.info.experiment_id], state["searchFilter"])
    assert [run.info.run_name for run in shown] == ["vmoe seed 0"]


def test_a_training_that_runs_again_shows_nothing_of_the_earlier_model(study):
    study.write()
    calibrate()
    study.write(stage="finetune")
    import_all()
    old = study.parent()
    time.sleep(0.01)
    importer = sync.AllStudiesImporter()
    with record_run("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 4.0})
        importer.import_all()
        new = study.parent()
        assert new.info.run_id != old.info.run_id and new.info.status == "RUNNING"
        assert new.data.metrics == {"loss/pretrain total": 4.0}
        assert study.parent_ids() == {}  # none of its stages is up to date
    importer.import_all()
    assert not [name for name in study.parent().data.metrics if name.startswith("ece/")]
    assert study.client.get_run(old.info.run_id).data.tags["dvc.current"] == "until retrained"
    assert "metrics.`ece/pretrain`" in study.view()["selectedColumns"]
    time.sleep(0.01)
    calibrate(ece=0.125)
    study.write(stage="finetune", steps=1)
    importer.import_all()
    assert study.parent().data.metrics["ece/pretrain"] == 0.125
    assert study.client.get_run(old.info.run_id).data.tags["dvc.current"] == "false"
    assert study.curve(study.parent(), "loss/finetune total") == [(1, 1.0)]
    assert set(study.parent_ids().values()) == {new.info.run_id}


def test_the_first_import_while_a_model_trains_again_shows_nothing_of_the_earlier_one(study):
    study.write()
    calibrate()
    time.sleep(0.01)
    with record_run("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 4.0})
        import_all()
        assert study.parent().data.metrics == {"loss/pretrain total": 4.0}


def test_numbers_relative_to_the_dense_model_follow_it(study, monkeypatch):
    from moecore.report import report_files

    given = []
    numbers = report_files.read_model_numbers_for_mlflow
    spy = lambda *a: (given.append((a[1], a[3])), numbers(*a))[1]
    monkeypatch.setattr(report_files, "read_model_numbers_for_mlflow", spy)
    study.write()
    study.write(method="dense")
    import_all()
    given.clear()
    time.sleep(0.01)
    study.write(method="dense")
    import_all()
    assert [method for method, _ in given] == ["dense", "vmoe"]
    assert given[1][1] == {"vmoe": {"pretrain/vmoe/0"}, "dense": {"pretrain/dense/0"}}


def test_a_restored_training_has_its_old_parent_again(study):
    study.write()
    shutil.copytree(PUBLISHED, "kept")
    import_all()
    old = study.parent().info.run_id
    study.write(steps=1)
    import_all()
    shutil.rmtree(PUBLISHED)
    shutil.copytree("kept", PUBLISHED)
    assert import_all() == {"current": 1} and study.parent().info.run_id == old
    assert sorted(run.data.tags["dvc.current"] for run in study.runs()) == ["false", "true"]


def test_what_dvc_locked_is_current(study):
    study.write(0)
    study.write(1)
    entry = {"cmd": "x", "outs": [{"path": str(PUBLISHED)}]}
    Path("dvc.lock").write_text(json.dumps({"stages": {"pretrain@vmoe-0": entry}}))
    assert import_all() == {"runs added": 2, "current": 1}
    assert only_run(study).data.tags["dvc.current"] == "true"
    assert only_run(study, 1).data.tags["dvc.current"] == "false"
    Path("dvc.lock").write_text("stages: {code: 3}")
    with pytest.raises(UserError, match="dvc.lock"):
        sync.sync_runs()


def test_a_method_that_was_removed_leaves_the_view_and_colours_are_the_reports(study):
    Path("params.yaml").write_text("run: {methods: [dense, vmoe]}\n")
    study.write()
    study.write(method="gone")
    import_all()
    from moecore.report.figures.drawing import line_style

    assert study.parent().data.tags["mlflow.runColor"] == line_style(1)["color"]
    [gone] = [run for run in study.parents() if run.data.tags["method"] == "gone"]
    assert gone.data.tags["dvc.current"] == "false"


def test_a_killed_run_ends_and_its_resumption_logs_no_step_twice(study):
    Path("live.py").write_text(LIVE)
    importer = sync.AllStudiesImporter()
    process = study.start("live.py", "1", "4", str(WORK), "wait")
    process.stdout.readline()
    importer.import_all()
    assert only_run(study).info.status == "RUNNING"
    process.send_signal(signal.SIGKILL)
    process.wait()
    importer.import_all()
    assert only_run(study).info.status == study.parent().info.status == "KILLED"
    process = study.start("live.py", "3", "6", str(WORK), "wait")  # the checkpoint was at step 2
    process.stdout.readline()
    import_all()  # of another process, in between
    importer.import_all()
    assert only_run(study).info.status == study.parent().info.status == "RUNNING"
    process.terminate()
    process.wait()
    importer.import_all()
    assert study.start("live.py", "7", "7", str(WORK)).wait(timeout=120) == 0
    importer.import_all()
    assert only_run(study).info.status == "FINISHED"
    expected = [(step, float(step)) for step in range(1, 8)]
    assert study.curve(only_run(study), "loss/total") == expected
    assert study.curve(study.parent(), "loss/pretrain total") == expected


def test_a_run_whose_history_and_process_are_gone_is_ended(study):
    study.write()
    import_all()
    run = only_run(study)
    study.client.update_run(run.info.run_id, status="RUNNING")
    study.client.set_tag(run.info.run_id, "pid", "999999")
    (PUBLISHED / "history.jsonl").unlink()
    study.write(seed=1)
    assert import_all()["ended"] == 1 and only_run(study).info.status == "KILLED"


def test_a_failed_run_says_why_and_what_was_deleted_in_the_store_is_imported_again(study):
    with pytest.raises(UserError), record_run("pretrain", None, method="vmoe", seed=0):
        raise UserError("the loss is not finite")
    importer = sync.AllStudiesImporter()
    importer.import_all()
    assert only_run(study).info.status == "FAILED"
    assert only_run(study).data.tags["error"] == "UserError: the loss is not finite"
    for run in study.every_run():
        study.client.delete_run(run.info.run_id)
    assert importer.import_all()["runs added"] == 1


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        (r"(experiments restore -x \d+)", {"current": 1}),
        (r"(gc .*? --experiment-ids \d+)", {"runs added": 1, "current": 1}),
    ],
    ids=["restore", "remove"],
)
def test_an_experiment_that_was_deleted_is_one_line_with_what_mends_it(study, command, counts):
    from mlflow.cli import cli as mlflow_cli  # imports MLflow's server

    study.write()
    import_all()
    experiment = study.client.get_experiment_by_name(study.folder.name)
    study.client.delete_experiment(experiment.experiment_id)
    said = f"{experiment.name!r} was deleted in MLflow; restore it"
    with pytest.raises(UserError, match=re.escape(said)) as error:
        import_all()
    assert "\n" not in str(error.value)
    words = re.search(f"mlflow {command}`", str(error.value))
    environment = {"MLFLOW_TRACKING_URI": mlflow_connection.store_address()}
    assert CliRunner().invoke(mlflow_cli, words[1].split(), env=environment).exit_code == 0
    assert import_all() == counts


def test_an_import_that_was_killed_is_completed_by_the_next(study, monkeypatch):
    study.write()
    calibrate()
    kill = Mock(side_effect=SystemExit)
    for owner, name in ((module.StudyImporter, "_send_figures"), (module, "mark_import_complete")):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(owner, name, kill)
            import_all()
    import_all()
    assert import_all() == {"current": 2}
    [run] = [run for run in study.runs() if run.data.tags["stage"] == "pretrain"]
    assert study.curve(run, "loss/total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert study.parent().data.metrics["ece/pretrain"] == 0.5 and len(study.every_run()) == 3


def test_a_dead_server_is_one_line_without_the_password(study, monkeypatch):
    study.write()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(UserError) as error:
        sync.sync_runs()
    said = str(error.value)
    assert said.startswith("http://me:***@127.0.0.1:9: ")
    assert "secret" not in said and "\n" not in said and "moecore sync" in said


def test_a_full_disk_is_one_line_and_the_import_goes_on_later(study, monkeypatch, disk):
    file = disk.folder / "mlflow.db"
    shutil.copyfile(study.store.removeprefix("sqlite:///"), file)
    study.store = f"sqlite:///{file}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", study.store)
    study.write(steps=3000)
    disk.fill(free=8192)
    with pytest.raises(UserError) as error:
        sync.sync_runs()
    assert str(file) in str(error.value) and "disk is full" in str(error.value)
    assert "\n" not in str(error.value)
    disk.clear()
    sync.sync_runs()
    assert len(study.curve(only_run(study), "loss/total")) == 3000


def test_two_processes_make_one_store_and_one_run(study, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    study.store = f"sqlite:///{tmp_path}/mlflow.db"
    study.write()
    (tmp_path / "mlflow.db.part").write_text("of one that was killed while it made the database")
    for process in [study.moecore("sync") for _ in range(2)]:
        _, error = process.communicate(timeout=300)
        assert (process.returncode, error) == (0, "")
    assert study.curve(only_run(study), "loss/total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (tmp_path / "mlruns").is_dir()


def test_params_are_what_is_given_no_defaults_and_the_kinds_of_parts():
    summary = {"test_correct": 84, "test_count": 359, "seconds": 0.4}
    summary |= {"test_score.value": 0.2339, "test_score.low": 0.1931}
    metrics, params = split_metrics_and_params("finetune", summary)
    assert params == {"finetune.test_count": 359}
    assert metrics == {"test/correct": 84, "test/score": 0.2339, "train/seconds overall": 0.4}
    metrics, params = split_metrics_and_params("cost", {"latency_ms.median": 2.5, "rounds": 5})
    assert (metrics, params) == ({"cost/latency_ms": 2.5}, {"cost.rounds": 5})
    method = {"router": {"kind": "noisy_top_k", "k": 1}, "experts": {"kind": "mlp", "number": 16}}
    method |= {"blocks": [0], "regularizers": [{"kind": "load"}, {"kind": "z_loss", "weight": 0.5}]}
    pretrain = {"epochs": 4, "batch": 128, "learning_rate": 0.002, "clip": None}
    whole = {"method": Method(**method), "pretrain": Training(**pretrain), "other": {"size": 1}}
    header = flatten_keys(to_jsonable(whole))
    expected = flatten_keys({"method": method, "pretrain": pretrain, "other": {"size": 1}})
    assert select_changed_params(header) == expected and len(header) > 40


def test_the_routing_of_a_training_has_curves_and_a_map_while_it_trains(study):
    importer, point = sync.AllStudiesImporter(), None
    with record_run("pretrain", None, method="vmoe", seed=0) as run:
        for step, counts in ((10, (6, 2)), (20, (8, 0))):
            run.log(step, {"loss": 1.0})
            layer = LayerTotals(counts, 8, 4.0, 2.0, 8)
            point = build_routing_point(
                step, {"MoE 1": layer}, point, MonitorSettings(dead_after=10), 0.5
            )
            run.log_routing(point)
            importer.import_all()
        stored = only_run(study)
        names = ("max_violation", "dead")
        curves = {name: study.curve(stored, f"routing/{name} of MoE 1") for name in names}
        assert curves == {"max_violation": [(10, 0.5), (20, 1.0)], "dead": [(10, 0), (20, 1)]}
        assert study.curve(stored, "routing/agreement with last epoch")[-1] == (20, 0.5)
        [drawn] = study.client.list_artifacts(stored.info.run_id, "figures")
        assert drawn.path == "figures/expert_load.png"


def test_a_result_of_other_code_is_left_out_in_words(study):
    with record_run("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.write_result(Params())
    import_all()
    run = only_run(study)
    assert study.client.list_artifacts(run.info.run_id, "figures") == []
    said = run.data.tags["moecore.figures"]
    assert said.startswith("left out: ") and "pretrain/vmoe/0.json" in said

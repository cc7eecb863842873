"""One parent run a method and seed, with the numbers of its stages; names, colours, generations."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.measure.base import Skipped
from moecore.measure.calibration import Quality, Result
from moecore.report.figures.drawing import INK, line_look
from moecore.run.history import record
from moecore.statistics.intervals import Estimate
from moecore.tasks.class_scores import reliability
from moecore.tracking import figures
from moecore.tracking import sync as module
from moecore.tracking.names import curve, numbers
from moecore.tracking.study import Counts
from moecore.tracking.sync import Importer, sync
from stages.prepare import prepare
from tests.tracking.conftest import CARD, Params


def parent(study, name: str = "vmoe/0", current: str = "true") -> Any:
    [found] = [
        run
        for run in study.parents()
        if run.data.tags["moecore.family"] == name and run.data.tags["dvc.current"] == current
    ]
    return found


def parent_ids(study) -> dict[str, str]:
    """Stage → the id of its parent, of the current runs."""
    return {
        run.data.tags["stage"]: run.data.tags["mlflow.parentRunId"]
        for run in study.runs()
        if run.data.tags["dvc.current"] == "true"
    }


def calibrate(ece: float = 0.5) -> None:
    """A measurement of the pretrained model."""
    Path("artifacts/data/pretrain").mkdir(parents=True, exist_ok=True)
    Path("artifacts/data/pretrain/card.json").write_text(json.dumps(CARD))
    found = calibrated()
    after = found.after.model_copy(
        update={"ece": found.after.ece.model_copy(update={"value": ece})}
    )
    with record("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.result(found.model_copy(update={"after": after}))


def everything(study) -> list[Any]:
    return sorted(
        (run.info.run_id, run.info.status, run.info.end_time, run.data.to_dictionary())
        for run in study.every_run()
    )


def test_stages_are_children_and_curves_stand_side_by_side(study):
    study.write()
    study.write(stage="finetune")
    with record("prepare", None, phase="pretrain"):
        pass
    assert Importer().update() == Counts(added=3, current=3)
    found = parent(study)
    assert found.info.run_name == "vmoe seed 0" and found.info.status == "FINISHED"
    assert parent_ids(study)["pretrain"] == parent_ids(study)["finetune"] == found.info.run_id
    assert parent_ids(study)["prepare"] == parent(study, "shared").info.run_id
    for phase in ("pretrain", "finetune"):
        assert study.curve(found, f"loss/{phase} total") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert found.data.params["epochs"] == "3"


def test_a_second_import_changes_nothing_and_a_grown_study_adds(study):
    study.write()
    calibrate()
    Importer().update()
    before = everything(study)
    assert Importer().update() == Counts(current=2)
    assert everything(study) == before
    study.write(seed=1)
    study.write(stage="finetune")
    assert Importer().update() == Counts(added=2, current=4)
    assert len(study.parents()) == 2
    assert parent_ids(study)["finetune"] == parent(study).info.run_id


def test_the_parent_has_the_headline_numbers_also_when_they_change(study):
    study.write()
    calibrate()
    Importer().update()
    assert parent(study).data.metrics["test/pretrain ece_after"] == 0.5
    first = parent(study).info.run_id
    calibrate(ece=0.25)
    assert Importer().update() == Counts(added=1, current=2)
    assert parent(study).data.metrics["test/pretrain ece_after"] == 0.25
    assert parent(study).info.run_id == first  # the model is the same


def test_a_training_that_runs_again_begins_a_new_parent(study):
    study.write()
    study.write(stage="finetune")
    Importer().update()
    old = parent(study).info.run_id
    time.sleep(0.01)
    study.write(steps=2)
    Importer().update()
    new = parent(study).info.run_id
    assert new != old and parent(study, current="false").info.run_id == old
    # what has not run again is of the old model
    assert parent_ids(study) == {"pretrain": new, "finetune": old}
    assert "loss/finetune total" not in parent(study).data.metrics
    time.sleep(0.01)
    study.write(stage="finetune", steps=1)
    Importer().update()
    assert parent_ids(study) == {"pretrain": new, "finetune": new}
    assert study.curve(parent(study), "loss/finetune total") == [(1, 1.0)]


def test_a_restored_training_has_its_old_parent_again(study):
    study.write()
    Importer().update()
    old = parent(study).info.run_id
    shutil.copytree("artifacts/history/pretrain/vmoe/0", "kept")
    study.write(steps=1)
    Importer().update()
    shutil.rmtree("artifacts/history/pretrain/vmoe/0")
    shutil.copytree("kept", "artifacts/history/pretrain/vmoe/0")
    assert Importer().update() == Counts(current=1)
    assert parent(study).info.run_id == old


def test_a_running_training_is_seen_in_its_parent(study):
    importer = Importer()
    with record("pretrain", None, method="vmoe", seed=0) as run:
        run.log(1, {"loss": 1.0, "validation_accuracy": 0.5})
        importer.update()
        assert parent(study).info.status == "RUNNING"
        run.log(2, {"loss": 0.5})
        importer.update()
        assert study.curve(parent(study), "loss/pretrain total") == [(1, 1.0), (2, 0.5)]
    importer.update()
    assert parent(study).info.status == "FINISHED"
    assert study.curve(parent(study), "validation/pretrain accuracy") == [(1, 0.5)]


def test_colours_are_those_of_the_report(study):
    Path("params.yaml").write_text("run: {methods: [dense, prc, vmoe]}\n")
    study.write()
    study.write(method="dense")
    study.write(method="gone")
    Importer().update()
    places = {"vmoe/0": 2, "dense/0": 0}
    for name, place in places.items():
        assert parent(study, name).data.tags["mlflow.runColor"] == line_look(place)["color"]
    assert parent(study, "gone/0").data.tags["mlflow.runColor"] == INK
    colours = {run.data.tags["method"]: run.data.tags["mlflow.runColor"] for run in study.runs()}
    assert colours["vmoe"] == line_look(2)["color"]


def test_nothing_new_is_said_without_asking_mlflow(study, monkeypatch):
    study.write()
    assert "1 runs added" in sync()
    monkeypatch.setattr(module, "connect", lambda: 1 / 0)
    assert sync().endswith("nothing is new; 1 are current")
    study.write(seed=1)
    with pytest.raises(ZeroDivisionError):
        sync()


def test_what_was_deleted_in_the_store_is_imported_again(study):
    study.write()
    sync()
    for run in study.every_run():
        study.client.delete_run(run.info.run_id)
    assert "1 runs added" in sync()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss", "loss/total"),
        ("importance", "loss/importance"),
        ("train_accuracy", "train/accuracy"),
        ("learning_rate", "train/learning_rate"),
        ("validation_loss", "validation/loss"),
    ],
)
def test_curves_come_in_sections(name, shown):
    assert curve(name) == shown


def test_what_is_given_is_a_param_and_no_chart():
    summary = {
        "test_correct": 84,
        "test_count": 359,
        "test_score.value": 0.2339,
        "test_score.low": 0.1931,
        "test_score.high": 0.2805,
        "validation_loss": 0.5,
        "seconds": 0.4,
    }
    found = numbers("finetune", summary)
    assert found.metrics == {
        "test/correct": 84,
        "test/score": 0.2339,
        "validation/loss": 0.5,
        "train/seconds overall": 0.4,
    }
    assert found.params == {
        "finetune.test_count": 359,
        "finetune.test_score.limits": "0.1931 to 0.2805",
    }
    cost = numbers("cost", {"latency_ms.median": 2.5, "latency_ms.low": 2.4, "rounds": 5})
    assert cost.metrics == {"cost/latency_ms": 2.5, "cost/latency_ms.low": 2.4}
    assert cost.params == {"cost.rounds": 5}


def files(study) -> list[str]:
    [run] = study.runs()
    return [file.path for file in study.client.list_artifacts(run.info.run_id, "figures")]


def said(study) -> str:
    [run] = study.runs()
    assert run.info.status == "FINISHED"
    return run.data.tags.get("moecore.figures", "")


def test_prepared_data_are_looked_at(study, monkeypatch):
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    Path("params.yaml").write_text("data:\n  pretrain: {kind: digits, train_limit: 100}\n")
    prepare("pretrain")
    Importer().update()
    assert files(study) == ["figures/samples.png"]
    assert said(study) == "samples"


def calibrated() -> Result:
    some = Estimate(value=0.5, low=0.4, high=0.6)
    bins = reliability(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    quality = Quality(score=some, nll=some, brier=some, ece=some, bins=bins)
    return Result(
        kind="temperature",
        temperature=2.0,
        at_limit=False,
        validation_images=4,
        test_images=4,
        scores="",
        before=quality,
        after=quality,
    )


def test_a_typed_result_is_drawn(study):
    with record("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.result(calibrated())
    Importer().update()
    assert files(study) == ["figures/reliability.png"]
    assert said(study) == "reliability"


def test_a_result_of_other_code_is_left_out_in_words(study):
    with record("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.result(Params())
    Importer().update()
    assert said(study).startswith("left out: ")
    assert "pretrain/vmoe/0.json: written by other code" in said(study)


def test_a_measurement_that_does_not_apply_has_no_figures(study):
    with record("routing", None, phase="pretrain", method="dense", seed=0) as run:
        run.result(Skipped(skipped="no MoE layer"))
    Importer().update()
    assert said(study) == ""


def test_what_is_missing_is_left_out_in_words(study):
    with record("prepare", None, phase="pretrain"):
        pass
    shutil.rmtree("artifacts/data", ignore_errors=True)
    Importer().update()
    assert said(study).startswith("left out: ")


def test_a_fault_in_a_drawing_is_shown_and_the_run_is_complete(study, monkeypatch, capsys):
    def broken(*_):
        raise IndexError("no such layer")

    monkeypatch.setattr(figures, "figures", broken)
    study.write()
    assert Importer().update().added == 1
    assert said(study) == "failed: IndexError: no such layer"
    assert "Traceback" in capsys.readouterr().err
    assert Importer().update().current == 1

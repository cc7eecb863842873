"""Figures in MLflow, drawn of what a run wrote."""

import shutil
from pathlib import Path

import torch

from moecore.measure.base import Skipped
from moecore.measure.calibration import Quality, Result
from moecore.run.history import record
from moecore.statistics.estimate import Estimate
from moecore.tasks.class_scores import reliability
from moecore.tracking import figures
from moecore.tracking.sync import Importer
from stages.prepare import prepare
from tests.tracking.conftest import Params


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

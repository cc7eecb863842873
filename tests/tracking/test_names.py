"""How numbers are called in MLflow, and what is drawn of a run."""

import shutil
from pathlib import Path

import pytest

from moecore.measure.base import Skipped
from moecore.run.history import record
from moecore.tracking.metric_names import curve_name, stage_numbers
from moecore.tracking.sync import Importer
from stages.prepare import prepare
from tests.tracking.conftest import Params, calibrate, only_run


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
    assert curve_name(name) == shown


def test_what_is_given_is_a_param_and_no_chart():
    summary = {
        "test_correct": 84,
        "test_count": 359,
        "test_score.value": 0.2339,
        "test_score.low": 0.1931,
        "validation_loss": 0.5,
        "seconds": 0.4,
    }
    metrics, params = stage_numbers("finetune", summary)
    assert params == {"finetune.test_count": 359}
    assert metrics == {
        "test/correct": 84,
        "test/score": 0.2339,
        "validation/loss": 0.5,
        "train/seconds overall": 0.4,
    }
    metrics, params = stage_numbers("cost", {"latency_ms.median": 2.5, "rounds": 5})
    assert (metrics, params) == ({"cost/latency_ms": 2.5}, {"cost.rounds": 5})


def figures(study) -> tuple[list[str], str]:
    """The files of the one run, and what is said of them."""
    Importer().import_all()
    run = only_run(study)
    listed = study.client.list_artifacts(run.info.run_id, "figures")
    return [file.path for file in listed], run.data.tags.get("moecore.figures", "")


def test_prepared_data_are_drawn(study, monkeypatch):
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    Path("params.yaml").write_text("data:\n  pretrain: {kind: digits, train_limit: 100}\n")
    prepare("pretrain")
    assert figures(study) == (["figures/samples.png"], "samples")


def test_a_typed_result_is_drawn(study):
    calibrate()
    assert figures(study) == (["figures/reliability.png"], "reliability")


def test_a_result_of_other_code_is_left_out_in_words(study):
    with record("calibrate", None, phase="pretrain", method="vmoe", seed=0) as run:
        run.result(Params())
    names, said = figures(study)
    assert names == [] and said.startswith("left out: ") and "pretrain/vmoe/0.json" in said


def test_a_measurement_that_does_not_apply_has_no_figures(study):
    with record("routing", None, phase="pretrain", method="dense", seed=0) as run:
        run.result(Skipped(skipped="no MoE layer"))
    assert figures(study) == ([], "")


def test_data_that_are_gone_are_left_out_in_words(study):
    with record("prepare", None, phase="pretrain"):
        pass
    shutil.rmtree("artifacts/data", ignore_errors=True)
    assert figures(study)[1].startswith("left out: ")

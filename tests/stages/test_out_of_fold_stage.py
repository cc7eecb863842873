"""The stage ``out_of_fold``: every training volume is predicted by a model that never saw its
participant.

The stage ``prepare`` end to end on the digits: the folder, its history; a failure leaves the
old.
"""

import json

import numpy as np
import pytest

from moecore.brain import out_of_fold as brain
from moecore.brain.ages import Ages, fit
from moecore.brain.out_of_fold import folds_of
from moecore.brain.prediction_table import read_predictions
from moecore.core.files import UserError
from moecore.data.contact import contact_sheet
from moecore.data.prepared import Prepared
from moecore.measure.base import Skipped, read_result
from moecore.measure.calibrators.linear import Linear
from moecore.pipeline.code_hashes import write_code
from stages import out_of_fold as stage
from stages.prepare import prepare
from tests.volumes import leaning, write_cohort

RESULT = "artifacts/measured/out_of_fold/pretrain/dense/0.json"
PARAMS = """
run: {methods: [dense]}
model: {kind: vit3d, patch: 8, width: 16, depth: 1, heads: 2}
pretrain: {epochs: 1, batch: 4, learning_rate: 1.0e-3}
methods: {dense: {}}
out_of_fold: {folds: 3, batch: 5}
calibrate: {calibrator: {kind: linear, fit_on: out_of_fold}}
"""


def test_folds_split_no_participant_and_have_old_and_young():
    people = [f"p{number // 2}" for number in range(60)]  # two sessions each
    ages = np.repeat(np.linspace(40, 90, 30), 2)
    folds = folds_of(people, ages, 5, 0)
    assert (folds[::2] == folds[1::2]).all() and np.bincount(folds).tolist() == [12] * 5
    assert all(abs(ages[folds == fold].mean() - 65) < 5 for fold in range(5))
    assert not np.array_equal(folds, folds_of(people, ages, 5, 1)) and np.array_equal(
        folds, folds_of(people, ages, 5, 0)
    )
    with pytest.raises(UserError, match="at most the 30 participants"):
        folds_of(people, ages, 31, 0)


def test_every_volume_is_predicted_by_a_model_without_its_participant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_THREADS", "1")
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    (tmp_path / "params.yaml").write_text(PARAMS)
    write_code("params.yaml")
    data = write_cohort(
        tmp_path / "artifacts/data/pretrain", numbers={"train": 12, "validation": 4, "test": 4}
    )
    trained = []
    asked = []
    job_without = brain.job_without
    predictions = brain.predictions

    def without(recipe, opened, kept, *rest):
        trained.append(set(kept.tolist()))
        return job_without(recipe, opened, kept, *rest)

    def spied(model, images, *rest, **words):
        asked.append(len(images))
        return predictions(model, images, *rest, **words)

    monkeypatch.setattr(brain, "job_without", without)
    monkeypatch.setattr(brain, "predictions", spied)
    stage.out_of_fold("dense", 0)
    path = tmp_path / "artifacts/out_of_fold/pretrain/dense/0/predictions.csv"
    rows = read_predictions(path)
    people = [row["participant_id"] for row in data.subjects("train")]
    assert (
        [row["participant_id"] for row in rows] == people and sum(asked) == 12 and len(trained) == 3
    )
    for place, row in enumerate(rows):
        kept = trained[int(row["qc_flags"].rpartition("fold ")[2])]
        assert place not in kept and people[place] not in {people[other] for other in kept}
    (tmp_path / "w").write_bytes(b"")
    ages = Ages.of(data, leaning(data), tmp_path / "w")
    assert fit(ages, Linear(fit_on="out_of_fold", min_slope=1e-9), path).n == 12
    result = read_result(tmp_path / RESULT, brain.Result, "out_of_fold")
    predicted = np.array([float(row["predicted_age"]) for row in rows])
    assert (result.folds, result.n) == (3, 12)
    assert result.mae == pytest.approx(np.abs(predicted - data.train.labels).mean(), abs=1e-3)


def test_nothing_is_trained_where_the_calibration_needs_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    (tmp_path / "params.yaml").write_text(
        PARAMS.replace("fit_on: out_of_fold", "fit_on: validation")
    )
    write_code("params.yaml")
    write_cohort(
        tmp_path / "artifacts/data/pretrain", numbers={"train": 12, "validation": 4, "test": 4}
    )
    monkeypatch.setattr(brain, "job_without", lambda *given: pytest.fail("a model was trained"))
    stage.out_of_fold("dense", 0)
    assert [
        path.name for path in (tmp_path / "artifacts/out_of_fold/pretrain/dense/0").iterdir()
    ] == ["absent.json"]
    result = read_result(tmp_path / RESULT, brain.Result, "out_of_fold")
    assert isinstance(result, Skipped) and "other predictions" in result.skipped


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECORE_PARAMS", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def test_prepare_writes_data_and_history(study):
    (study / "params.yaml").write_text(
        "data:\n  finetune: {kind: digits, size: 14, train_limit: 100}\n"
    )
    prepare("finetune")
    opened = Prepared.open("artifacts/data/finetune", verify=True)
    assert opened.train.images.shape == (100, 1, 14, 14)
    lines = [
        json.loads(line)
        for line in (study / "artifacts/history/prepare/finetune/history.jsonl")
        .read_text()
        .splitlines()
    ]
    assert any(line.get("dataset", {}).get("kind") == "digits" for line in lines)


def test_a_failure_leaves_what_was_there(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digits}\n")
    prepare("finetune")
    (study / "params.yaml").write_text("data:\n  finetune: {kind: image_folder, root: nowhere}\n")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        prepare("finetune")
    assert Prepared.open("artifacts/data/finetune").card["kind"] == "digits"


def test_unknown_names_and_kinds_are_named(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digit}\n")
    with pytest.raises(UserError, match="params.yaml:2"):
        prepare("finetune")
    with pytest.raises(UserError, match="data.pretrain: missing"):
        prepare("pretrain")


def test_contact_sheet_has_a_row_a_class(study):
    (study / "params.yaml").write_text("data:\n  finetune: {kind: digits}\n")
    prepare("finetune")
    axes = contact_sheet(Prepared.open("artifacts/data/finetune"), shots=3).axes
    assert len(axes) == 30 and [axis.get_ylabel() for axis in axes[::3]] == list("0123456789")

"""The stage ``calibrate`` on a small cohort of volumes, with the kind of calibrator that real labels need."""

import json

import pytest
import torch

from moecore.artifacts import load_model, save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.vit3d import Vit3d
from moecore.calibration.linear import FittedLinear
from moecore.data.digits import Digits
from moecore.evaluation.predict import predictions
from moecore.files import StageError
from moecore.predictions import read_predictions
from stages import calibrate as stage
from tests.cohort import write_cohort

PARAMS = "calibrate: {calibrator: {kind: linear, min_slope: 1.0e-9}, resamples: 100, batch: 7}\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for an untrained model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("calibrate")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        data = write_cohort(folder / "artifacts/data/pretrain", numbers={"train": 20, "validation": 12, "test": 9})
        torch.manual_seed(1)
        model = Vit3d(patch=8, width=16, depth=1, heads=2).build(ImageSpec.from_card(data.card), None)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # a head that starts at 0 says the same of every volume
        target = folder / "artifacts/pretrain/dense/0"
        target.mkdir(parents=True)
        save_model(target, model)
        stage.calibrate("pretrain", "dense", 0)
        yield folder, data


def test_it_predicts_years_and_writes_everything(results):
    folder, data = results
    rows = read_predictions(folder / "artifacts/calibrate/pretrain/dense/0/predictions.csv")
    said = predictions(load_model(folder / "artifacts/pretrain/dense/0"), data.test.images, 9, routing=False)[0][:, 0]
    assert [float(row["predicted_age"]) for row in rows[-9:]] == pytest.approx(said.tolist(), abs=1e-3)
    fitted = FittedLinear.from_json((folder / "artifacts/calibrate/pretrain/dense/0/calibrator.json").read_text())
    assert fitted.pooled.n == 20
    found = json.loads((folder / "artifacts/measured/calibrate/pretrain/dense/0.json").read_text())
    assert found["task"] == "regression" and found["n_test"] == 9 and found["predictor_sha256"] == fitted.predictor_sha256
    kept = json.loads((folder / "results/calibrate/pretrain/dense/0.json").read_text())
    assert kept["raw"]["mae"]["value"] == found["raw"]["mae"]["value"] and "points" not in kept


def test_it_draws(results):
    history = results[0] / "artifacts/history/calibrate/pretrain/dense/0"
    assert all((history / f"figures/{name}.png").stat().st_size > 5000 for name in ("age_scatter", "pad_against_age", "errors_by_group"))
    assert [row["prediction"] for row in json.loads((history / "tables/table_s1.json").read_text())] == ["raw", "pooled", "sex_specific"]


@pytest.mark.parametrize(("kind", "real", "allowed"), [("temperature", True, "real numbers; allowed: linear"), ("linear", False, "classes; allowed: temperature")])
def test_another_kind_of_calibrator_is_refused(results, tmp_path, monkeypatch, kind, real, allowed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(f"calibrate: {{calibrator: {{kind: {kind}}}}}\n")
    target = tmp_path / "artifacts/data/pretrain"
    if real:
        write_cohort(target, numbers={"train": 4, "validation": 3, "test": 3})
    else:
        target.mkdir(parents=True)
        Digits(size=12, train_limit=50, test_limit=60).prepare(target)
    with pytest.raises(StageError, match=rf"calibrate.calibrator.kind: found {kind}; the labels of data.pretrain are {allowed}"):
        stage.calibrate("pretrain", "dense", 0)

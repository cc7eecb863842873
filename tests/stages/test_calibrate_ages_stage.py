"""The stage ``calibrate`` on a small cohort of volumes, with the kind of calibrator that real
labels need.
"""

import pytest
import torch

from moecore.brain.measured_ages import Result
from moecore.brain.prediction_table import read_predictions
from moecore.core.files import UserError
from moecore.data.sources.digits import Digits
from moecore.measure.base import read_result
from moecore.measure.calibrators.linear import FittedLinear
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.predict import predictions
from moecore.training.artifacts import load_model, save_model
from stages import calibrate as stage
from tests.cohort import write_cohort

PARAMS = "calibrate: {calibrator: {kind: linear, min_slope: 1.0e-9}, resamples: 100, batch: 7}\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for an untrained model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("calibrate")
        patch.chdir(folder)
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        data = write_cohort(
            folder / "artifacts/data/pretrain", numbers={"train": 20, "validation": 12, "test": 9}
        )
        torch.manual_seed(1)
        model = Vit3d(patch=8, width=16, depth=1, heads=2).build(
            ImageSpec.from_card(data.card), None
        )
        for parameter in model.parameters():
            # a head that starts at 0 says the same of every volume
            parameter.data += 0.02 * torch.randn_like(parameter)
        target = folder / "artifacts/pretrain/dense/0"
        target.mkdir(parents=True)
        save_model(target, model)
        stage.calibrate("pretrain", "dense", 0)
        yield folder, data


def test_it_predicts_years_and_writes_everything(results):
    folder, data = results
    rows = read_predictions(folder / "artifacts/calibrate/pretrain/dense/0/predictions.csv")
    said = predictions(
        load_model(folder / "artifacts/pretrain/dense/0"), data.test.images, 9, routing=False
    )[0][:, 0]
    assert [float(row["predicted_age"]) for row in rows[-9:]] == pytest.approx(
        said.tolist(), abs=1e-3
    )
    fitted = FittedLinear.from_json(
        (folder / "artifacts/calibrate/pretrain/dense/0/calibrator.json").read_text()
    )
    assert fitted.pooled.n == 20
    path = folder / "artifacts/measured/calibrate/pretrain/dense/0.json"
    found = read_result(path, Result, "calibrate")
    assert (found.kind, found.n_test) == ("linear", 9)
    assert found.predictor_sha256 == fitted.predictor_sha256 and found.calibration == fitted
    assert len(found.points.age) == 9 and found.raw.mae.value > 0


@pytest.mark.parametrize(
    ("kind", "real", "allowed"),
    [
        ("temperature", True, "regression; allowed: linear"),
        ("linear", False, "classification; allowed: temperature"),
    ],
)
def test_another_kind_of_calibrator_is_refused(results, tmp_path, monkeypatch, kind, real, allowed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(f"calibrate: {{calibrator: {{kind: {kind}}}}}\n")
    target = tmp_path / "artifacts/data/pretrain"
    if real:
        write_cohort(target, numbers={"train": 4, "validation": 3, "test": 3})
    else:
        target.mkdir(parents=True)
        Digits(size=12, train_limit=50, test_limit=60).prepare(target)
    with pytest.raises(
        UserError,
        match=rf"calibrate.calibrator.kind: found {kind}; the task of data.pretrain is {allowed}",
    ):
        stage.calibrate("pretrain", "dense", 0)

"""Pretrain, teacher, teacher_router and finetune on a cohort of volumes; killed and resumed."""

from pathlib import Path

import pytest
import torch

from moecore import UserError, predict_in_batches
from moecore.brain.age_predictions import read_predictions
from moecore.core import streams
from moecore.core.config import read_json_settings
from moecore.measure.base import read_result
from moecore.measure.calibrators.linear import FittedLinesByGroup
from moecore.measure.routing_metrics.epoch_routing import EpochRecorder
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.vit3d import Vit3d
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.stages import calibrate as stage
from moecore.stages.finetune import finetune
from moecore.stages.pretrain import pretrain
from moecore.stages.teacher import teacher
from moecore.stages.teacher_router import teacher_router
from moecore.training.artifacts import load_model, save_model
from moecore.training.outcome import Outcome
from tests.data.making import balls, write_cohort

PARAMS = """\
run: {methods: [dense, vmoe, ermoe_ba, control, tgr], seeds: [0], phases: [pretrain]}
model: {kind: vit3d, patch: 8, width: 24, depth: 4, heads: 2, mlp_ratio: 2, stem: pooled}
methods:
  dense: {}
  vmoe:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 5, hidden_ratio: 1}
    regularizers: [{kind: importance}]
  tgr:
    router: {kind: noisy_top_k, k: 2}
    experts: {kind: mlp, number: 5, hidden_ratio: 1}
    regularizers: [{kind: router_kl}]
    guided_finetuning: true
  ermoe_ba:
    router: {kind: eigenbasis, k: 2, context: learned}
    experts: {kind: eigen, number: 5, hidden_ratio: 1}
    regularizers: [{kind: orthogonality, weight: 5.0e-5}]
    regions: {experts: [wm, gm, csf], warm_start_epochs: 1}
  control: {permuted: true}
teacher:
  kind: dense
  model: {kind: vit3d, patch: 8, width: 24, depth: 4, heads: 2, mlp_ratio: 2, stem: pooled}
  training: {epochs: 1, batch: 8, learning_rate: 0.003}
teacher_router: {steps: 3, batch: 8, learning_rate: 0.01}
pretrain:
  {epochs: 3, batch: 8, learning_rate: 0.003, log_every: 3, checkpoint_every: 3,
   views: {shift: 1, flip: true}}
finetune: {epochs: 1, batch: 8, learning_rate: 0.003, log_every: 3}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    data = balls(folder / "artifacts/data/pretrain")
    balls(folder / "artifacts/data/finetune", counts=(8, 4, 6))
    (folder / "params.yaml").write_text(PARAMS, encoding="utf-8")
    patched = pytest.MonkeyPatch()
    patched.setenv("MOECORE_THREADS", "1")  # tiny products: threads would wait for each other
    patched.chdir(folder)
    try:
        write_all_hashes("params.yaml")
        teacher(0)
        for method in ("dense", "vmoe", "tgr", "ermoe_ba", "control"):
            teacher_router(method, 0)
            pretrain(method, 0)
        finetune("finetune", "ermoe_ba", 0)
        finetune("finetune", "tgr", 0)
        yield data
    finally:
        patched.undo()


def measured(method, stage="pretrain"):
    return read_result(Path("artifacts/measured") / stage / method / "0.json", Outcome, stage)


def test_errors_are_in_years_with_limits(study):
    found = measured("vmoe")
    assert found.task.score.name == "mae" and found.task.score.unit == "years"
    assert found.task.target == "age" and found.test_count == 12
    for score in (found.test_score, found.validation_score):
        assert 0 < score.low <= score.value <= score.high < 60
    last = found.curve[-1]["validation_mae"]
    assert found.validation_score.value == pytest.approx(last, rel=1e-4)
    assert found.test_correct is None and found.confusion is None and found.class_maps == {}
    # ages 20 … 90 in 12 even steps; the median of the training ages is 55: errors 35/11 · (1, 3, …,
    # 11), each twice
    assert found.median_mae == pytest.approx(35 / 11 * 6)


def test_the_saved_model_predicts_what_was_reported(study):
    ages, _ = predict_in_batches(load_model("artifacts/pretrain/ermoe_ba/0"), study.test.images, 5)
    assert ages.shape == (12, 1)
    error = (ages[:, 0] - torch.tensor(study.test.labels)).abs().mean()
    assert float(error) == pytest.approx(measured("ermoe_ba").test_score.value, rel=1e-5)


def test_the_routing_of_tissues_is_seen_at_three_epochs(study):
    found = measured("ermoe_ba").region_routing
    assert [probed.epoch for probed in found] == [1, 2, 3]
    for probed in found:
        tissues = ["wm", "gm", "csf"]
        assert [row.region for row in probed.rows] == [*tissues, *map("random_{}".format, tissues)]
        for row in probed.rows:
            assert set(row.share) == {"wm", "gm", "csf", "free_3", "free_4"}
            (_, first), (_, second) = row.experts
            assert first >= second
    row = measured("vmoe").region_routing[0].rows[0]
    assert set(row.share) == {f"expert_{i}" for i in range(5)}
    assert measured("dense").region_routing == ()


def test_a_control_learns_permuted_ages_and_fine_tuning_keeps_head_and_teacher(study):
    plain, control = measured("dense"), measured("control")
    assert plain.curve[0]["train_mae"] != control.curve[0]["train_mae"]
    assert plain.median_mae == control.median_mae
    found = measured("ermoe_ba", "finetune")
    assert found.test_score.value < 40 and "region_routing" not in found.curve[-1]
    assert "router_kl" in measured("tgr", "finetune").curve[-1]


def test_a_seed_shares_no_stream_with_its_teacher(study, monkeypatch):
    """Of the same shape, trained on the same images, under the same number."""
    seeds: dict[str, set] = {}
    digest, seeded = streams._hash_words, torch.manual_seed

    def run(stage, *item):
        said: set = set()
        monkeypatch.setattr(streams, "_hash_words", lambda *key: said.add(key) or digest(*key))
        monkeypatch.setattr(torch, "manual_seed", lambda seed: said.add(seed) or seeded(seed))
        stage(*item)
        seeds[stage.__name__] = said

    run(teacher, 0)
    run(teacher_router, "tgr", 0)
    run(pretrain, "tgr", 0)
    assert {(0, 0), (0, 0, streams.VIEWS), (0, 0, streams.NOISE), 0} <= seeds["pretrain"]
    assert all(len(said) >= 3 for said in seeds.values()), "weights, order, whose they are"
    pairs = [("teacher", "teacher_router"), ("teacher", "pretrain"), ("teacher_router", "pretrain")]
    assert not [pair for pair in pairs if seeds[pair[0]] & seeds[pair[1]]]
    first = load_model("artifacts/teacher/0").state_dict()
    student = load_model("artifacts/pretrain/dense/0").state_dict()
    assert not [name for name in first if torch.equal(first[name], student[name])]


def test_killed_after_an_epoch_it_goes_on_to_the_same_model(study, monkeypatch):
    expected = Path("artifacts/pretrain/ermoe_ba/0/model.safetensors").read_bytes()
    rows = measured("ermoe_ba").region_routing
    look = EpochRecorder.record

    def killed(self, epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        look(self, epoch)

    monkeypatch.setattr(EpochRecorder, "record", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain("ermoe_ba", 0)
    monkeypatch.setattr(EpochRecorder, "record", look)
    pretrain("ermoe_ba", 0)
    assert Path("artifacts/pretrain/ermoe_ba/0/model.safetensors").read_bytes() == expected
    assert measured("ermoe_ba").region_routing == rows


NO_METHODS = "run: {methods: []}\n"
CALIBRATION = "calibrate: {calibrator: {kind: linear, min_slope: 1.0e-9}, batch: 7}\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("calibrate")
        patch.chdir(folder)
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(NO_METHODS + CALIBRATION)
        write_all_hashes("params.yaml")
        numbers = {"train": 20, "validation": 12, "test": 9}
        data = write_cohort(folder / "artifacts/data/pretrain", numbers=numbers)
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
    model = load_model(folder / "artifacts/pretrain/dense/0")
    said = predict_in_batches(model, data.test.images, 9, routing=False)[0][:, 0]
    told = pytest.approx(said.tolist(), abs=1e-3)
    assert [float(row["predicted_age"]) for row in rows[-9:]] == told
    path = folder / "artifacts/calibrate/pretrain/dense/0/calibrator.json"
    fitted = read_json_settings(path, FittedLinesByGroup, "a calibrator")
    assert fitted.pooled.n == 20
    path = folder / "artifacts/measured/calibrate/pretrain/dense/0.json"
    found = read_result(path, Found, "calibrate")
    assert (found.facts["kind"], found.facts["n_test"]) == ("linear", 9)
    assert found.facts["predictor_sha256"] == fitted.predictor_sha256
    assert len(found.facts["points"]["age"]) == 9 and found.find("mae_raw").value > 0


def test_another_kind_of_calibrator_is_refused(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = "calibrate: {calibrator: {kind: temperature}}\n"
    (tmp_path / "params.yaml").write_text(NO_METHODS + settings)
    write_all_hashes("params.yaml")
    numbers = {"train": 4, "validation": 3, "test": 3}
    write_cohort(tmp_path / "artifacts/data/pretrain", numbers=numbers)
    said = (
        r"calibrate.calibrator.kind: found temperature; .* regression; allowed: gap_on_age, linear"
    )
    with pytest.raises(UserError, match=said):
        stage.calibrate("pretrain", "dense", 0)

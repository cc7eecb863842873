"""From mosaics to fine-tuned models: the stages prepare, pretrain, finetune and adversarial."""

import numpy as np
import pytest

from moecore.data.prepared import Prepared
from moecore.measure.base import read_result
from moecore.nn.predict import predict_in_batches
from moecore.pipeline.code_hashes import write_code
from moecore.stages import finetune, prepare, pretrain
from moecore.tasks.classification import Classification
from moecore.tasks.multi_label import MultiLabel
from moecore.training.artifacts import load_model, save_no_guide
from moecore.training.outcome import Outcome

TRAINING = "batch: 50, learning_rate: 0.005, log_every: 5, warmup_epochs: 0.5, precision: float32"
PARAMS = f"""\
run: {{methods: [dense, vmoe], seeds: [0], phases: [finetune, adversarial]}}
data:
  pretrain:
    {{kind: mosaic, source: {{kind: digits, size: 8}}, train: 500, validation: 100, test: 150}}
  finetune: &clean {{kind: digits, size: 16, train_limit: 300, test_limit: 150}}
  adversarial: *clean
model: {{kind: vit, patch: 4, width: 16, depth: 2, heads: 2, mlp_ratio: 2}}
methods:
  dense: {{}}
  vmoe:
    router: {{kind: noisy_top_k, k: 2}}
    experts: {{kind: mlp, number: 4, hidden_ratio: 1}}
    blocks: [1]
    regularizers: [{{kind: importance, weight: 0.005}}]
pretrain: {{epochs: 4, {TRAINING}}}
finetune: &training {{epochs: 3, {TRAINING}}}
adversarial: {{epochs: 3, {TRAINING}, adversarial: {{steps: 2, epsilon: 0.05}}}}
calibrate: {{calibrator: {{kind: temperature}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every stage ran for the method with experts, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("several")
        patch.chdir(home)
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (home / "params.yaml").write_text(PARAMS)
        write_code("params.yaml")
        for name in ("pretrain", "finetune", "adversarial"):
            prepare.prepare(name)
        (home / "artifacts/teacher_router/vmoe/0").mkdir(parents=True)
        save_no_guide(home / "artifacts/teacher_router/vmoe/0")
        pretrain.pretrain("vmoe", 0)
        finetune.finetune("finetune", "vmoe", 0)
        finetune.finetune("adversarial", "vmoe", 0)
        yield home


def measured(folder, phase: str) -> Outcome:
    return read_result(folder / f"artifacts/measured/{phase}/vmoe/0.json", Outcome, phase)


def test_pretraining_reports_precision_at_1(folder):
    found = measured(folder, "pretrain")
    data = Prepared.open(folder / "artifacts/data/pretrain")
    model = load_model(folder / "artifacts/pretrain/vmoe/0")
    best = predict_in_batches(model, data.test.images, 70)[0].argmax(1).numpy()
    hits = [int(data.test.labels[image, best[image]]) for image in range(150)]
    assert found.task == MultiLabel(classes=tuple("0123456789"))
    assert found.test_correct == sum(hits)
    assert found.test_count == 150
    assert found.test_score.value == pytest.approx(sum(hits) / 150)
    assert found.test_score.low < found.test_score.value < found.test_score.high
    assert found.false_discovery_rate == pytest.approx(1 - sum(hits) / 150)
    assert found.confusion is None
    last = found.curve[-1]["validation_accuracy"]
    assert found.validation_score.value == pytest.approx(last)
    # four cells show 3.4 of ten classes on average, so a guess is right in 34 %; it has learned
    # more than that
    assert found.test_score.value > 0.45
    assert found.test_loss < 10 * np.log(2)


def test_class_maps_count_an_image_for_each_of_its_labels(folder):
    maps = np.array(measured(folder, "pretrain").class_maps["4"])
    data = Prepared.open(folder / "artifacts/data/pretrain")
    model = load_model(folder / "artifacts/pretrain/vmoe/0")
    probs = predict_in_batches(model, data.validation.images, 100)[1][0].probs.mean(1).numpy()
    expected = [probs[data.validation.labels[:, digit] == 1].mean(0) for digit in range(10)]
    np.testing.assert_allclose(maps[:, 0], expected, atol=1e-4)


def test_clean_and_adversarial_models_stand_side_by_side(folder):
    clean = measured(folder, "finetune")
    attacked = measured(folder, "adversarial")
    for found in (clean, attacked):
        assert found.task == Classification(classes=tuple("0123456789"))
        assert found.false_discovery_rate is None
        assert len(found.confusion) == 10
        assert found.test_count == 150
    models = (folder / f"artifacts/{phase}/vmoe/0" for phase in ("finetune", "adversarial"))
    first, second = ((model / "model.safetensors").read_bytes() for model in models)
    assert first != second
    assert (folder / "artifacts/history/adversarial/vmoe/0/history.jsonl").exists()
    losses = [found.curve[0]["train_loss"] for found in (clean, attacked)]
    assert losses[0] < losses[1], "attacked images are harder"
